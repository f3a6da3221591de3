// Runs mixtures of experts that are larger than memory with an unpatched llama.cpp: hoistway reads the experts that the
// router of a layer chooses, under a budget of memory, before llama.cpp multiplies with them.
//
//     stream_experts::options options;
//     options.budget_bytes = 8ull << 30;
//     stream_experts::model model("model.gguf", options);
//     stream_experts::context context(model, llama_context_default_params());
//     context.decode(batch); // as llama_decode; then llama_get_logits_ith(context.get(), -1)
//
// Kernels are llama.cpp's, and so are the logits, bit by bit. A model is refused by an exception if it cannot be run in this
// way. Processors only: tensors of experts lie in memory of the host.
#pragma once

#include "hoistway-streaming.h"
#include "user-model.h"

#include "llama.h"

#include <cstdint>
#include <memory>
#include <string>

namespace stream_experts {

// The budget, the policy, and where lines go that say what is done in another way than was asked for: stderr unless set.
using options = hoistway_streaming::options;

// A model without the weights of its experts. Throws std::runtime_error, or hoistway::Error.
class model {
public:
    model(const std::string & path, const options & options,
          const llama_model_params & parameters = llama_model_default_params());
    ~model();

    llama_model * get() const;

    // What the store has done, as JSON.
    std::string stats() const;

    // The most tokens of a batch whose experts are within the budget in every layer, whatever they are; UINT32_MAX if the
    // budget holds all experts of a layer.
    uint32_t max_batch() const;

    // Whether the budget holds the experts of all layers: each is read once at most.
    bool holds_all_experts() const;

private:
    friend class context;
    struct state;
    std::unique_ptr<state> self;
};

// A context of a model, which must outlive it. One thread at a time may use it.
class context {
public:
    // Calls `cb_eval` and `abort_callback` in addition to its own, and cuts `n_ubatch` to what the budget allows, which it logs.
    context(const model & of, llama_context_params parameters);
    ~context();

    llama_context * get() const;

    // Replaces a file by a trace of what routers choose from now on, for `hoistway moe replay`: JSON lines. A batch of several
    // tokens counts as a prompt, and batches are those of one sequence. Throws std::runtime_error.
    void record(const std::string & path);

    // Calls llama_decode. Throws hoistway::Error if experts could not be read: then the logits are no result. Throws
    // std::runtime_error if a trace cannot be written.
    int32_t decode(const llama_batch & batch);

private:
    struct state;
    std::unique_ptr<state> self;
};

} // namespace stream_experts
