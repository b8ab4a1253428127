"""What the operator asks for: strict YAML, environment and ``--set`` into one frozen Deployment, every error at once.

To add a key: a field with a ``description`` in its section of ``deployment``; a ``Quantity`` as metadata if it has a
unit; an entry in ``NOT_YET`` as long as nothing reads it; its name in the frozen list of ``tests/config/test_keys.py``.
``show``, ``schema``, ``explain`` and the error messages follow from the field.
"""
