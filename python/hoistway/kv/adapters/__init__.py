"""The KV store in the places that engines have for one: vLLM, LMCache, SGLang and UCM load these without a patch.

Each module imports its engine, but for that of LMCache, which needs none.
"""
