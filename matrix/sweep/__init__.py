"""Every language model class of a transformers release, as small as it can be built, patched beside its unpatched twin."""
