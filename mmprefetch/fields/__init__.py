# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Which preprocessor fields count for a split, and where each came from.

:mod:`.sources` reads the levels of a config, :mod:`.datasets` the fields that stand at the datasets
of a split, and :mod:`.resolve` merges both field by field into a :mod:`.binding`. :mod:`.explain`
shows what comes out, with the file and line that :mod:`.locate` finds, and the likely
:mod:`.mistakes`.
"""
