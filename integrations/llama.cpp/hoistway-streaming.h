// Experts of a model that stay on the drive: hoistway reads those that the router of a layer chooses, under a budget of memory,
// before llama.cpp multiplies with them. What a patched llama.cpp and the library of stream-experts have in common.
#pragma once

#ifdef HOISTWAY_LINKED
#    include "hoistway.hpp"
#    define HOISTWAY_HIDDEN
#else
// The library is found at run time.
#    include "hoistway-library.h"
#endif

#include "llama.h"

#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

struct ggml_tensor;

namespace hoistway_streaming HOISTWAY_HIDDEN {

struct options {
    // Memory for experts, in bytes. A batch may exceed it by the experts that it uses in one layer.
    uint64_t budget_bytes = 0;
    // What is evicted: a policy of docs/moe-replay.md, or empty for the default.
    std::string policy;
    // How many experts a token uses in each layer; 0 for what the model says.
    uint32_t experts_per_token = 0;
    // Gets lines that say what is done in another way than was asked for, if it is set.
    std::function<void(const std::string & line)> log;
};

// Why a model without experts is refused.
class no_experts : public std::runtime_error {
public:
    no_experts() : std::runtime_error("the model has no experts: load it as it is, or stream its layers") {}
};

// Throws std::runtime_error if a weight has a type that llama.cpp takes and crashes with.
void refuse_doubles(const hoistway::Catalog & catalog);

// The experts of a model.
class experts {
public:
    // Throws no_experts, std::runtime_error if the budget is too small, or hoistway::Error.
    experts(const hoistway::Catalog & catalog, const options & options);

    // The layer whose experts a tensor of the model's files holds.
    std::optional<uint32_t> layer_of(const std::string & name) const;

    // Has a tensor lie in the store's address space. Throws std::runtime_error if it is not stacked as in the file.
    void place(ggml_tensor & tensor, const std::string & name);

    // Throws std::runtime_error unless all tensors of a layer's experts were placed, or none, as of a layer that is not used.
    void check_placed() const;

    // The most tokens of a batch whose experts are within the budget in every layer, whatever they are; UINT32_MAX if the
    // budget holds all experts of a layer.
    uint32_t max_batch() const { return most_tokens; }

    bool holds_all() const { return chosen.budget_bytes >= all_layers_bytes; }

    const hoistway::experts::Store & get_store() const { return store; }
    size_t placed_count() const { return placed.size(); }
    size_t stacked_count() const { return stacked.size(); }

private:
    friend class evaluation;

    struct slices {
        uint32_t layer;
        uint64_t bytes_of_expert;
    };

    options                                           chosen;
    hoistway::experts::Store                          store;
    uint64_t                                          largest_layer_bytes = 0;
    uint64_t                                          all_layers_bytes    = 0;
    uint32_t                                          most_tokens         = UINT32_MAX;
    // By layer, the number of its experts.
    std::map<uint32_t, uint32_t>                      layers {};
    // Stacked tensors, by name.
    std::unordered_map<std::string, slices>           stacked {};
    std::unordered_map<const ggml_tensor *, uint32_t> placed {};

    void plan();
    void say(const std::string & line) const;
};

// What a context does with experts. One thread at a time may use it.
class evaluation {
public:
    // Takes `cb_eval` and `abort_callback`, and calls those of the caller in addition. Cuts `n_ubatch` to what the budget
    // allows, which it logs. `of` must outlive it. Throws std::runtime_error if the budget is too small for several sequences.
    evaluation(const experts & of, llama_context_params & parameters);

    evaluation(const evaluation &) = delete;
    evaluation & operator=(const evaluation &) = delete;

    // Changes the caller's callback to `callback`, and sets both to what llama.cpp is to call.
    void chain_abort(ggml_abort_callback & callback, void *& data);

    // Gets what routers choose: a layer, the experts of one token after the other, and how many each token has.
    std::function<void(uint32_t layer, const std::vector<uint32_t> & chosen, size_t per_token)> on_choice {};

    // A graph has been computed: frees its experts. Returns why it failed, if experts could not be read.
    std::exception_ptr end();

private:
    static bool on_node(ggml_tensor * node, bool ask, void * context);
    static bool on_abort(void * context);

    std::optional<uint32_t> chosen_layer(const ggml_tensor & node) const;
    void check(const ggml_tensor & node) const;
    bool are_leased(const ggml_tensor * named) const;
    static std::vector<uint32_t> choice_of(const ggml_tensor & node);
    void lease_chosen(const ggml_tensor & node);
    void tell_of_large_batch(uint32_t number, int64_t tokens);

    const experts &                  owner;
    ggml_backend_sched_eval_callback callers      = nullptr;
    void *                           callers_data = nullptr;
    ggml_abort_callback              abort        = nullptr;
    void *                           abort_data   = nullptr;
    // Whether the caller asked for the node that is computed next, and this for it.
    bool                             is_callers   = false;
    bool                             is_choice    = false;
    // The layer whose experts are leased, and the tensor that names them.
    hoistway::experts::Lease         lease {};
    uint32_t                         layer        = UINT32_MAX;
    const ggml_tensor *              ids          = nullptr;
    std::vector<uint32_t>            chosen {};
    std::vector<uint32_t>            distinct {};
    std::exception_ptr               failure {};
    bool                             told = false;
};

} // namespace hoistway_streaming
