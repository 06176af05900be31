# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
# The digits' own mean and std replace the model's; its pad_size_divisor stays.
_base_ = './common.py'
