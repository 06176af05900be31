# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""OpenMMLab's packages, as far as they are installed.

In an environment of their own: ``pip install -r requirements/downstream.txt``, then
``pip install --no-deps -r requirements/downstream_nodeps.txt``. Without, these tests are skipped.
"""

from packages import let_import

let_import()
