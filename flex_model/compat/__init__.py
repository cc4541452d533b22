"""The API of release 0.1.0 that this library does not need itself: thin wrappers.

Users import them by 0.1.0's paths: ``flex_model.core``, ``flex_model.distributed`` and
``flex_model.utils``. ``flex_model.traverse`` is another part of it.
"""
