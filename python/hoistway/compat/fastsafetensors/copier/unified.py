"""Not offered: the copier ``unified`` of `fastsafetensors.copier`."""

from hoistway.compat.fastsafetensors._absent import absent_copier

raise absent_copier("unified")
