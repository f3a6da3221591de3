"""Not offered: `safetensors.tensorflow` loads and saves tensors of tensorflow."""

from hoistway.compat.safetensors._errors import no_module

raise no_module("tensorflow")
