"""Not offered: `safetensors.paddle` loads and saves tensors of paddle."""

from hoistway.compat.safetensors._errors import no_module

raise no_module("paddle")
