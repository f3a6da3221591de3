"""Not offered: the copier ``nogds`` of `fastsafetensors.copier`."""

from hoistway.compat.fastsafetensors._absent import absent_copier

raise absent_copier("nogds")
