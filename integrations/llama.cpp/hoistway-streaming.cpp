// Ollama compiles this folder into mtmd too, which has no experts.
#ifndef OLLAMA_COMPAT_MTMD_BUILD

#include "hoistway-streaming.h"

#include "ggml-backend.h"
#include "ggml.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace hoistway_streaming {
namespace {

// The node that holds the experts that a router has chosen, by layer. A convention of llama.cpp's graphs, not an
// interface: what multiplies with experts is checked against it.
constexpr const char CHOSEN[] = "ffn_moe_topk-";

// An expert's slices share a page with their neighbours at both ends.
constexpr uint64_t PAGES_PER_PART = 2 * 4096;

std::string mib(uint64_t bytes) {
    char text[32];
    std::snprintf(text, sizeof text, "%.1f MiB", (double) bytes / (1 << 20));
    return text;
}

hoistway::experts::Options store_options(const options & options) {
    if (options.budget_bytes == 0) {
        throw std::runtime_error("there is no budget for experts");
    }
    hoistway::experts::Options chosen(options.budget_bytes);
    chosen.backing = "host_sparse";
    chosen.experts_per_token = options.experts_per_token;
    chosen.policy  = options.policy.empty() ? nullptr : options.policy.c_str();
    // A prompt may want all experts of a layer at once, and a drive may be slow. Nothing holds experts while that is waited for.
    chosen.timeout_ms = UINT64_MAX;
    return chosen;
}

} // namespace

void refuse_doubles(const hoistway::Catalog & catalog) {
    for (const hoistway_tensor & stored : catalog) {
        if (stored.ggml_type == GGML_TYPE_F64 && stored.dimensions > 1) {
            throw std::runtime_error(std::string(stored.name) + " has the type F64, which llama.cpp cannot multiply with");
        }
    }
}

experts::experts(const hoistway::Catalog & catalog, const options & options)
    : chosen(options), store(catalog, store_options(options)) {
    plan();
}

// What batches of so many tokens need of the budget, and which tensors are stacked.
void experts::plan() {
    const hoistway_experts_model described = store.describe();
    if (described.experts == 0) {
        throw no_experts();
    }
    for (const hoistway_experts_layer_info & layer : store.layers()) {
        const auto parts = store.parts(layer.layer, 0);
        for (const hoistway_part & part : parts) {
            stacked.emplace(part.tensor, slices { layer.layer, part.bytes });
        }
        layers.emplace(layer.layer, layer.experts);
        const uint64_t expert_bytes = layer.expert_bytes + parts.size() * PAGES_PER_PART;
        const uint64_t layer_bytes  = layer.experts * expert_bytes;
        const uint64_t used         = described.experts_per_token > 0 ? described.experts_per_token : layer.experts;
        largest_layer_bytes = std::max(largest_layer_bytes, layer_bytes);
        all_layers_bytes += layer_bytes;
        if (layer_bytes > chosen.budget_bytes) {
            most_tokens = (uint32_t) std::min<uint64_t>(most_tokens, chosen.budget_bytes / (used * expert_bytes));
            if (most_tokens == 0) {
                throw std::runtime_error("the budget of " + mib(chosen.budget_bytes) + " does not hold the " +
                                         mib(used * expert_bytes) + " of experts that one token uses in layer " +
                                         std::to_string(layer.layer));
            }
        }
    }
    if (described.token_cycle_bytes > chosen.budget_bytes) {
        say("a token uses " + mib(described.token_cycle_bytes) + " of experts in all layers, and the budget is " +
            mib(chosen.budget_bytes) + ": most of them are read again for each token");
    }
}

void experts::say(const std::string & line) const {
    if (chosen.log) {
        chosen.log(line);
    }
}

std::optional<uint32_t> experts::layer_of(const std::string & name) const {
    const auto found = stacked.find(name);
    return found == stacked.end() ? std::nullopt : std::optional<uint32_t>(found->second.layer);
}

void experts::place(ggml_tensor & tensor, const std::string & name) {
    const slices & stored = stacked.at(name);
    if (!ggml_is_contiguous(&tensor) || tensor.ne[2] != layers.at(stored.layer) || tensor.ne[3] != 1 ||
        tensor.nb[2] != stored.bytes_of_expert) {
        throw std::runtime_error("it is not stacked as experts are in the file");
    }
    void * address = store.tensor_address(name);
    if (!address) {
        throw std::runtime_error("it has no place in the store's address space");
    }
    tensor.data = address;
    placed.emplace(&tensor, stored.layer);
}

void experts::check_placed() const {
    std::map<uint32_t, size_t> missing;
    for (const auto & [name, stored] : stacked) {
        missing[stored.layer] += 1;
    }
    std::map<uint32_t, size_t> total = missing;
    for (const auto & [tensor, number] : placed) {
        missing[number] -= 1;
    }
    const bool partly = std::any_of(missing.begin(), missing.end(), [&](const auto & layer) {
        return layer.second != 0 && layer.second != total.at(layer.first);
    });
    if (partly || placed.empty()) {
        throw std::runtime_error("llama.cpp takes " + std::to_string(placed.size()) + " of the model's " +
                                 std::to_string(stacked.size()) + " tensors of experts");
    }
}

evaluation::evaluation(const experts & of, llama_context_params & parameters)
    : owner(of), callers(parameters.cb_eval), callers_data(parameters.cb_eval_user_data) {
    uint32_t most = of.max_batch();
    if (most != UINT32_MAX && parameters.n_seq_max > 1) {
        // llama.cpp computes one token more than n_ubatch if each is of another sequence.
        most -= 1;
        if (most == 0) {
            throw std::runtime_error("the budget of " + mib(of.chosen.budget_bytes) +
                                     " holds the experts of one token in a layer, and several sequences are computed together");
        }
    }
    if (parameters.n_ubatch == 0) {
        parameters.n_ubatch = parameters.n_batch;
    }
    if (parameters.n_ubatch > most) {
        of.say("batches are cut from " + std::to_string(parameters.n_ubatch) + " to " + std::to_string(most) +
               " tokens: a larger one may use more experts of a layer than the budget of " +
               mib(of.chosen.budget_bytes) + " holds");
        parameters.n_ubatch = most;
    }
    parameters.cb_eval           = on_node;
    parameters.cb_eval_user_data = this;
    chain_abort(parameters.abort_callback, parameters.abort_callback_data);
    // It would copy experts to a device before they are leased.
    parameters.op_offload = false;
}

void evaluation::chain_abort(ggml_abort_callback & callback, void *& data) {
    if (callback != on_abort) {
        abort      = callback;
        abort_data = data;
    }
    callback = on_abort;
    data     = this;
}

std::exception_ptr evaluation::end() {
    lease.reset();
    layer = UINT32_MAX;
    ids   = nullptr;
    return std::exchange(failure, nullptr);
}

// No exception may pass through llama.cpp: a failure ends the graph, and is the caller's once it has ended.
bool evaluation::on_node(ggml_tensor * node, bool ask, void * context) {
    auto & self = *static_cast<evaluation *>(context);
    if (self.failure) {
        return false;
    }
    try {
        if (!ask) {
            if (self.is_choice) {
                self.lease_chosen(*node);
            }
            return !self.is_callers || self.callers(node, false, self.callers_data);
        }
        self.check(*node);
        self.is_choice  = self.chosen_layer(*node).has_value();
        self.is_callers = self.callers && self.callers(node, true, self.callers_data);
        return self.is_choice || self.is_callers;
    } catch (...) {
        self.failure = std::current_exception();
        // After "false" for a node that was computed, ggml reports success, and the tokens of the batch stay in the cache.
        // The next node is aborted instead.
        return !ask;
    }
}

bool evaluation::on_abort(void * context) {
    auto & self = *static_cast<evaluation *>(context);
    return self.failure || (self.abort && self.abort(self.abort_data));
}

// The layer whose router's choice the node holds.
std::optional<uint32_t> evaluation::chosen_layer(const ggml_tensor & node) const {
    if (std::strncmp(node.name, CHOSEN, sizeof(CHOSEN) - 1) != 0 || node.type != GGML_TYPE_I32) {
        return std::nullopt;
    }
    const uint32_t number = (uint32_t) std::strtoul(node.name + sizeof(CHOSEN) - 1, nullptr, 10);
    return owner.layers.count(number) > 0 ? std::optional<uint32_t>(number) : std::nullopt;
}

// Fails if a node uses experts that are not leased: they would be read as zeros.
void evaluation::check(const ggml_tensor & node) const {
    const bool multiplies = node.op == GGML_OP_MUL_MAT_ID;
    for (const ggml_tensor * source : node.src) {
        const auto found = source ? owner.placed.find(source) : owner.placed.end();
        if (found == owner.placed.end()) {
            continue;
        }
        if (!multiplies || found->second != layer || !are_leased(node.src[2])) {
            throw std::runtime_error("'" + std::string(node.name) + "' uses '" + source->name +
                                     "' before the router's choice was seen: this model cannot be streamed");
        }
    }
}

// Whether a tensor names the experts that are leased: the router's choice itself, or ggml's copy of it for the processor, if the
// router ran on a device. Copies are made before the nodes that use them are asked for. Their names are a convention, so that
// what is in them is compared too.
bool evaluation::are_leased(const ggml_tensor * named) const {
    if (!named || !ids) {
        return false;
    }
    if (named == ids) {
        return true;
    }
    const std::string name = named->name;
    const size_t end   = name.rfind('#');
    const size_t begin = end == std::string::npos || end == 0 ? std::string::npos : name.rfind('#', end - 1);
    if (begin == std::string::npos || name.substr(begin + 1, end - begin - 1) != ids->name || named->op != GGML_OP_NONE ||
        named->type != GGML_TYPE_I32 || !ggml_are_same_shape(named, ids) || !named->buffer ||
        !ggml_backend_buffer_is_host(named->buffer)) {
        return false;
    }
    return choice_of(*named) == chosen;
}

// The experts that a router's choice names, of one token after the other. Its rows may be those of a longer tensor, of which it is
// a view.
std::vector<uint32_t> evaluation::choice_of(const ggml_tensor & node) {
    std::vector<uint8_t> bytes(ggml_nbytes(&node));
    ggml_backend_tensor_get(&node, bytes.data(), 0, bytes.size());
    std::vector<uint32_t> experts;
    experts.reserve((size_t) (node.ne[0] * node.ne[1]));
    for (int64_t token = 0; token < node.ne[1]; ++token) {
        for (int64_t place = 0; place < node.ne[0]; ++place) {
            int32_t expert = 0;
            std::memcpy(&expert, bytes.data() + token * node.nb[1] + place * node.nb[0], sizeof expert);
            experts.push_back((uint32_t) expert);
        }
    }
    return experts;
}

// Leases the experts that the router has chosen for all tokens of the batch. Those of the layer before have been used.
void evaluation::lease_chosen(const ggml_tensor & node) {
    lease.reset();
    chosen   = choice_of(node);
    distinct = chosen;
    std::sort(distinct.begin(), distinct.end());
    distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());

    const uint32_t number = *chosen_layer(node);
    if (on_choice) {
        on_choice(number, chosen, (size_t) node.ne[0]);
    }
    tell_of_large_batch(number, node.ne[1]);
    // A batch of which no output is asked for has no token left in the last layer.
    if (!chosen.empty()) {
        owner.store.observe(number, chosen);
        lease = owner.store.ensure(number, distinct);
    }
    layer = number;
    ids   = &node;
}

// Says once that a batch uses more experts than the budget holds of all layers.
void evaluation::tell_of_large_batch(uint32_t number, int64_t tokens) {
    const uint32_t experts = owner.layers.at(number);
    const uint64_t needed  = distinct.size() * (owner.largest_layer_bytes / experts) * owner.layers.size();
    if (told || tokens < 2 || needed <= owner.chosen.budget_bytes) {
        return;
    }
    told = true;
    owner.say("a batch of " + std::to_string(tokens) + " tokens uses " + std::to_string(distinct.size()) + " of " +
              std::to_string(experts) + " experts of layer " + std::to_string(number) +
              ", more than the budget holds of all layers: layers stream through it one by one");
}

} // namespace hoistway_streaming

#endif
