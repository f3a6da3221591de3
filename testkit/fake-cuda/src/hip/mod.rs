//! The functions of `libamdhip64.so`, with the signatures of `hip/hip_runtime_api.h` of ROCm 6.
#![allow(non_snake_case)]

mod device;
mod error_names;
mod work;
