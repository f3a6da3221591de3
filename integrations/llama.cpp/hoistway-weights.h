// Reads the weights of a load with hoistway, a batch for each buffer, if LLAMA_WEIGHT_SOURCE names its library.
#pragma once

#include "llama.h"

#include <cstddef>
#include <memory>

struct ggml_tensor;

class hoistway_weights {
public:
    // `size_done` of `size_data` bytes of the model are loaded; what is delivered is added to it.
    hoistway_weights(size_t & size_done, size_t size_data, llama_progress_callback progress, void * progress_data);
    ~hoistway_weights();

    hoistway_weights(const hoistway_weights &) = delete;
    hoistway_weights & operator=(const hoistway_weights &) = delete;

    // Takes a tensor whose bytes lie unchanged at `offset` of the open file, if hoistway can write to its buffer.
    void add(ggml_tensor * tensor, int file, size_t offset);

    // Reads all tensors that were taken. False if the progress callback cancelled the load. What could not be read is
    // not delivered, and the caller's to read.
    bool read();

    bool delivered(const ggml_tensor * tensor) const;

private:
    struct state;
    std::unique_ptr<state> self;
};
