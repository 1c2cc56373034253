"""The question `patching`: which layers and heads decide what comes out."""
