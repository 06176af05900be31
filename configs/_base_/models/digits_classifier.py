# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
model = dict(type='SimpleClassifier', num_classes=10, channels=(32, 64, 128), strides=(1, 1, 2))
