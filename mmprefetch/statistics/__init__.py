# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""The mean and std of a dataset's images.

:mod:`.measure` reads the images of a split as its pipeline does and adds up their :mod:`.moments`,
and :mod:`.write` puts the result into the config.
"""
