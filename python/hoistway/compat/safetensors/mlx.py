"""Not offered: `safetensors.mlx` loads and saves tensors of mlx."""

from hoistway.compat.safetensors._errors import no_module

raise no_module("mlx")
