"""Not offered: the copier ``gds`` of `fastsafetensors.copier`."""

from hoistway.compat.fastsafetensors._absent import absent_copier

raise absent_copier("gds")
