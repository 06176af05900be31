# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
__version__ = '0.1.0'
