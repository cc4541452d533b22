"""The API of release 0.1.0 that this library does not need itself: thin wrappers.

Users import them by 0.1.0's paths: ``flex_model.core``, ``flex_model.distributed``,
``flex_model.traverse`` and ``flex_model.utils``.
"""
