"""The packages of a wheel; all else about it is in pyproject.toml.

The files of configs/ become tff_fssl/configs/ in it, which pyproject.toml
cannot say beside a search for the other packages.
"""

import setuptools

_FOLDERS = setuptools.find_namespace_packages('configs')

setuptools.setup(
  packages=[
    *setuptools.find_packages(include=['tff_fssl*']),
    'tff_fssl.configs',
    *(f'tff_fssl.configs.{folder}' for folder in _FOLDERS),
  ],
  package_dir={'tff_fssl.configs': 'configs'},
  package_data={'': ['*.flags', '*.j2', '*.toml', 'py.typed']},
)
