"""Support for sharding frameworks: layouts and meshes are read from attributes of their modules,
without importing a framework that is not in use.
"""
