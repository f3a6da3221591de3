//go:build !linux

package hoistway

// This package supports Linux only so far. The build stops here, with the name below as its message.
var _ = the_Go_package_of_hoistway_supports_Linux_only_so_far
