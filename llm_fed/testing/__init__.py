"""The battery: what every method must pass, those of llm_fed and your own.

python -m llm_fed.testing my_package.my_module:MyMethod [key=value ...]
"""
