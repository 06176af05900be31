# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def read_version() -> str:
    """Read the version without importing the package, whose dependencies may not be there yet."""
    text = (ROOT / 'mmprefetch' / 'version.py').read_text(encoding='utf-8')
    return re.search(r"__version__ = '([^']+)'", text).group(1)


def read_requirements(name: str) -> list[str]:
    """Read a requirements file without its comments and empty lines."""
    lines = (ROOT / 'requirements' / f'{name}.txt').read_text(encoding='utf-8').splitlines()
    stripped = (line.split('#')[0].strip() for line in lines)
    return [line for line in stripped if line]


setup(
    name='mmprefetch',
    version=read_version(),
    description='Transfer and normalise the next batches while the current one trains, in mmengine',
    long_description=(ROOT / 'README.md').read_text(encoding='utf-8'),
    long_description_content_type='text/markdown',
    author='mmprefetch contributors',
    license='Apache License 2.0',
    classifiers=[
        'License :: OSI Approved :: Apache Software License',
        'Operating System :: POSIX :: Linux',
        'Programming Language :: Python :: 3',
        'Programming Language :: Python :: 3.11',
        'Topic :: Scientific/Engineering :: Artificial Intelligence',
    ],
    packages=find_packages(include=['mmprefetch', 'mmprefetch.*']),
    python_requires='>=3.11',
    # mmengine and mmcv are in the extra `mim`: they may come from the official packages or from a
    # fork that writes the same folders, so neither may be forced on an environment.
    install_requires=read_requirements('runtime'),
    extras_require={
        'mim': read_requirements('mminstall'),
        'cpu': read_requirements('cpu'),
        'demo': read_requirements('demo'),
        'deploy': read_requirements('deploy'),
        'tests': read_requirements('tests'),
    },
    zip_safe=False,
)
