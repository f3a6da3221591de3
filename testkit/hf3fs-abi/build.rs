//! Gives the library the name by which programs ask for it.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libhf3fs_api_shared.so");
}
