"""Not offered: the copier ``dstorage`` of `fastsafetensors.copier`."""

from hoistway.compat.fastsafetensors._absent import absent_copier

raise absent_copier("dstorage")
