# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""What a checkpoint knows of the preprocessing, and how it is used again.

:mod:`.safe_loading` lets torch's safe loader read mmengine's checkpoints. :mod:`.restore` rebuilds
the preprocessor of a split from the record in one, and :mod:`.export` puts it into an ONNX file.
"""
