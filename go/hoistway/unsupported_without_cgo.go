//go:build (linux || windows) && !cgo

package hoistway

// This package calls a C library. The build stops here, with the name below as its message.
var _ = the_Go_package_of_hoistway_needs_cgo_set_CGO_ENABLED_to_1_and_install_a_C_compiler
