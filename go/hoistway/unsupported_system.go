//go:build !linux && !windows

package hoistway

// This package supports Linux and Windows only so far. The build stops here, with the name below as its message.
var _ = the_Go_package_of_hoistway_supports_Linux_and_Windows_only_so_far
