"""The configs that X-ray ships, beside this file; installed as `xray.configs`."""
