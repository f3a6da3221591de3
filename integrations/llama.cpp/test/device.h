// A device that ggml takes for CUDA's, for tests without one.
#pragma once

// Its memory is the host's, but says that it is not; the processor computes. CUDA counts it second, by its PCI bus id.
void register_device();
