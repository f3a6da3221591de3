// Has a model's experts stay on the drive if HOISTWAY_EXPERTS_BUDGET says how much memory they may take.
#pragma once

#include "llama.h"

#include "ggml-backend.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

struct ggml_tensor;

// A load of a model, on the thread that loads it, while this lives.
class hoistway_experts_load {
public:
    // Opens the model's experts, if the environment asks for that, and changes the load mode of `parameters`. A model without
    // experts is loaded as always. Throws std::exception if the budget cannot be met.
    hoistway_experts_load(const std::string & path, const std::vector<std::string> & splits, bool is_file,
                          llama_model_params & parameters);
    ~hoistway_experts_load();

    hoistway_experts_load(const hoistway_experts_load &) = delete;
    hoistway_experts_load & operator=(const hoistway_experts_load &) = delete;

    // Returns the type of buffer for a tensor: that of streamed experts, or the one that llama.cpp has chosen. Throws
    // std::runtime_error if experts are to lie on a device.
    static ggml_backend_buffer_type_t buffer_type(const ggml_tensor * tensor, ggml_backend_buffer_type_t chosen);

    // Whether a tensor's experts are streamed.
    static bool holds(const ggml_tensor * tensor);

    // Throws std::runtime_error if llama.cpp is about to read experts that should be streamed.
    static void check_before_reading();

private:
    struct state;
    std::unique_ptr<state> self;
};

// What a context does with streamed experts.
class hoistway_experts_context {
public:
    // Changes the parameters of a context of a model. Returns nullptr if no experts of the model are streamed. Throws
    // std::runtime_error if the budget is too small. `rolls_back` if the model keeps the last `n_rs_seq` tokens' states.
    static std::unique_ptr<hoistway_experts_context> of(const std::vector<std::pair<std::string, ggml_tensor *>> & tensors,
                                                        bool is_causal, bool rolls_back, llama_context_params & parameters);
    ~hoistway_experts_context();

    // Sets what llama.cpp is to call in place of a callback of the caller.
    void chain_abort(ggml_abort_callback & callback, void *& data);

    // Whether a batch can be computed; if not, the log says why. Those without causal attention are computed at once.
    bool takes(uint32_t tokens, bool is_causal, uint32_t ubatch) const;

    // Throws std::runtime_error: training computes graphs by itself, and would read experts that are not in memory.
    [[noreturn]] static void refuse_training();

    // A graph has been computed. False if it has no result, as experts could not be read; the log says why.
    bool end();

private:
    struct state;
    explicit hoistway_experts_context(std::unique_ptr<state> made);
    std::unique_ptr<state> self;
};
