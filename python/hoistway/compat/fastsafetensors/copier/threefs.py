"""Not offered: the copier ``threefs`` of `fastsafetensors.copier`."""

from hoistway.compat.fastsafetensors._absent import absent_copier

raise absent_copier("threefs")
