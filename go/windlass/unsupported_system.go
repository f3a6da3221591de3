//go:build !linux

package windlass

// This package supports Linux only so far. The build stops here, with the name below as its message.
var _ = the_Go_package_of_windlass_supports_Linux_only_so_far
