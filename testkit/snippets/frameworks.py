"""What type checkers make of a framework's name: the tensors of that framework."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import hoistway

if TYPE_CHECKING:
    import jax
    import numpy as np
    import torch
    from typing_extensions import assert_type

    assert_type(hoistway.load_file("a")["a"], torch.Tensor)
    assert_type(hoistway.load_file("a", framework="pt", route="threads")["a"], torch.Tensor)
    assert_type(hoistway.load_file("a", framework="numpy")["a"], np.ndarray[Any, Any])
    assert_type(hoistway.load_file("a", framework="jax")["a"], jax.Array)
    assert_type(hoistway.load_file("a", framework="raw")["a"], hoistway.Tensor)
    assert_type(hoistway.load_file("a", framework="paddle")["a"], Any)
    assert_type(hoistway.open("a")["a"], torch.Tensor)
    assert_type(hoistway.open("a", framework="np").get_slice("a")[0], np.ndarray[Any, Any])
    assert_type(hoistway.open("a", framework="np").load(select="a")["a"], np.ndarray[Any, Any])
    assert_type(next(iter(hoistway.open("a", framework="raw"))), tuple[str, hoistway.Tensor])
    assert_type(next(hoistway.iter_tensors("a", framework="jax")), tuple[str, jax.Array])
    assert_type(hoistway.load(b"", framework="numpy")["a"], np.ndarray[Any, Any])

    checkpoint: hoistway.Checkpoint = hoistway.open("a", framework="numpy")
    assert_type(checkpoint["a"], Any)
