#include "stream-experts.h"

#include "trace.h"

#include "ggml-backend.h"
#include "ggml.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <stdexcept>
#include <unordered_map>
#include <vector>

#include <sys/sysinfo.h>

namespace stream_experts {
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

// llama.cpp allocates all experts, in memory that is never touched. By default Linux refuses an allocation that is larger
// than all memory.
void check_address_space(uint64_t bytes) {
    struct sysinfo info {};
    std::ifstream mode("/proc/sys/vm/overcommit_memory");
    int overcommit = 0;
    mode >> overcommit;
    const uint64_t memory = sysinfo(&info) == 0 ? (uint64_t) info.mem_unit * (info.totalram + info.totalswap) : UINT64_MAX;
    if (overcommit != 1 && bytes >= memory) {
        throw std::runtime_error("the experts take " + mib(bytes) + " of address space, and this machine has " +
                                 mib(memory) + " of memory: allow it with 'sysctl vm.overcommit_memory=1'");
    }
}

hoistway::experts::Options store_options(const options & options) {
    if (options.budget_bytes == 0) {
        throw std::runtime_error("there is no budget for experts");
    }
    hoistway::experts::Options chosen(options.budget_bytes);
    chosen.backing = "host_sparse";
    chosen.policy  = options.policy.empty() ? nullptr : options.policy.c_str();
    return chosen;
}

} // namespace

struct model::state {
    hoistway::Catalog                                 catalog;
    hoistway::experts::Store                          store;
    std::string                                       name;
    std::function<void(const std::string &)>          log;
    uint64_t                                          budget_bytes;
    uint64_t                                          largest_layer_bytes = 0;
    uint64_t                                          all_layers_bytes    = 0;
    uint32_t                                          max_batch           = UINT32_MAX;
    // By layer, the number of its experts.
    std::map<uint32_t, uint32_t>                      layers {};
    // Stacked tensors, by name, and the layers that they are of.
    std::unordered_map<std::string, uint32_t>         stacked {};
    std::unordered_map<const ggml_tensor *, uint32_t> placed {};
    std::optional<user_model>                         loaded {};

    state(const std::string & path, const options & options)
        : catalog(open_gguf(path)), store(catalog, store_options(options)),
          name(std::filesystem::path(path).filename().string()), log(options.log), budget_bytes(options.budget_bytes) {
        if (!log) {
            log = [](const std::string & line) { std::fprintf(stderr, "hoistway: %s\n", line.c_str()); };
        }
    }

    // What batches of so many tokens need of the budget, and which tensors are stacked.
    void plan() {
        const hoistway_experts_model described = store.describe();
        if (described.experts == 0) {
            throw std::runtime_error("the model has no experts: load it as it is, or stream its layers");
        }
        for (const hoistway_experts_layer_info & layer : store.layers()) {
            const auto parts = store.parts(layer.layer, 0);
            for (const hoistway_part & part : parts) {
                stacked.emplace(part.tensor, layer.layer);
            }
            layers.emplace(layer.layer, layer.experts);
            const uint64_t expert_bytes = layer.expert_bytes + parts.size() * PAGES_PER_PART;
            const uint64_t layer_bytes  = layer.experts * expert_bytes;
            const uint64_t used         = described.experts_per_token > 0 ? described.experts_per_token : layer.experts;
            largest_layer_bytes = std::max(largest_layer_bytes, layer_bytes);
            all_layers_bytes += layer_bytes;
            if (layer_bytes > budget_bytes) {
                max_batch = (uint32_t) std::min<uint64_t>(max_batch, budget_bytes / (used * expert_bytes));
                if (max_batch == 0) {
                    throw std::runtime_error("the budget of " + mib(budget_bytes) + " does not hold the " +
                                             mib(used * expert_bytes) + " of experts that one token uses in layer " +
                                             std::to_string(layer.layer));
                }
            }
        }
        check_address_space(described.expert_bytes);
        if (described.token_cycle_bytes > budget_bytes) {
            log("a token uses " + mib(described.token_cycle_bytes) + " of experts in all layers, and the budget is " +
                mib(budget_bytes) + ": most of them are read again for each token");
        }
    }

    // Has a stacked tensor lie in the store's address space.
    bool place(ggml_tensor & tensor, const hoistway_tensor & stored) {
        const auto found = stacked.find(stored.name);
        if (found == stacked.end()) {
            return false;
        }
        const uint32_t experts = layers.at(found->second);
        if (!ggml_is_contiguous(&tensor) || tensor.ne[2] != experts || tensor.nb[2] * experts != stored.bytes) {
            throw std::runtime_error("it is not stacked as experts are in the file");
        }
        void * address = store.tensor_address(stored.name);
        if (!address) {
            throw std::runtime_error("it has no place in the store's address space");
        }
        tensor.data = address;
        placed.emplace(&tensor, found->second);
        return true;
    }
};

model::model(const std::string & path, const options & options, const llama_model_params & parameters)
    : self(std::make_unique<state>(path, options)) {
    self->plan();
    // A device's host buffer is pinned: all experts would be resident.
    llama_model_params plain = parameters;
    plain.no_host            = true;
    self->loaded.emplace(self->catalog, path, plain, [this](ggml_tensor & tensor, const hoistway_tensor & stored) {
        return self->place(tensor, stored);
    });
    if (self->placed.size() != self->stacked.size()) {
        throw std::runtime_error("llama.cpp takes " + std::to_string(self->placed.size()) + " of the model's " +
                                 std::to_string(self->stacked.size()) + " tensors of experts");
    }
}

model::~model() = default;

llama_model * model::get() const {
    return self->loaded->get();
}

std::string model::stats() const {
    return self->store.stats();
}

uint32_t model::max_batch() const {
    return self->max_batch;
}

bool model::holds_all_experts() const {
    return self->budget_bytes >= self->all_layers_bytes;
}

struct context::state {
    struct deleter {
        void operator()(llama_context * context) const { llama_free(context); }
    };

    const stream_experts::model::state &    owner;
    std::unique_ptr<llama_context, deleter> handle {};
    // The layer whose experts are leased, and the tensor that names them.
    hoistway::experts::Lease lease {};
    uint32_t                 layer = UINT32_MAX;
    const ggml_tensor *      ids   = nullptr;
    std::vector<uint8_t>     bytes {};
    std::vector<uint32_t>    chosen {};
    std::vector<uint32_t>    distinct {};
    std::exception_ptr       failure {};
    bool                     told = false;
    std::optional<trace>     recorded {};

    // No exception may pass through llama.cpp: a failure ends the graph, and is thrown once llama_decode has returned.
    static bool on_node(ggml_tensor * node, bool ask, void * context) {
        auto & self = *static_cast<state *>(context);
        if (self.failure) {
            return false;
        }
        try {
            if (!ask) {
                self.lease_chosen(*node);
                return true;
            }
            self.check(*node);
            return self.layer_of(*node).has_value();
        } catch (...) {
            self.failure = std::current_exception();
            // After "false" for a node that was computed, ggml reports success, and the tokens of the batch stay in the cache.
            // The next node is aborted instead.
            return !ask;
        }
    }

    static bool on_abort(void * context) {
        return static_cast<state *>(context)->failure != nullptr;
    }

    // The layer whose router's choice the node holds.
    std::optional<uint32_t> layer_of(const ggml_tensor & node) const {
        if (std::strncmp(node.name, CHOSEN, sizeof(CHOSEN) - 1) != 0 || node.type != GGML_TYPE_I32) {
            return std::nullopt;
        }
        const uint32_t number = (uint32_t) std::strtoul(node.name + sizeof(CHOSEN) - 1, nullptr, 10);
        return owner.layers.count(number) > 0 ? std::optional<uint32_t>(number) : std::nullopt;
    }

    // Fails if a node uses experts that are not leased: they would be read as zeros.
    void check(const ggml_tensor & node) const {
        const bool multiplies = node.op == GGML_OP_MUL_MAT_ID;
        for (const ggml_tensor * source : node.src) {
            const auto found = source ? owner.placed.find(source) : owner.placed.end();
            if (found == owner.placed.end()) {
                continue;
            }
            if (!multiplies || found->second != layer || node.src[2] != ids) {
                throw std::runtime_error("'" + std::string(node.name) + "' uses '" + source->name +
                                         "' before the router's choice was seen: this model cannot be streamed");
            }
        }
    }

    // Leases the experts that the router has chosen for all tokens of the batch. Those of the layer before have been used.
    void lease_chosen(const ggml_tensor & node) {
        lease.reset();
        bytes.resize(ggml_nbytes(&node));
        ggml_backend_tensor_get(&node, bytes.data(), 0, bytes.size());
        // Rows are those of a longer tensor, of which the node is a view.
        chosen.clear();
        for (int64_t token = 0; token < node.ne[1]; ++token) {
            for (int64_t place = 0; place < node.ne[0]; ++place) {
                int32_t expert = 0;
                std::memcpy(&expert, bytes.data() + token * node.nb[1] + place * node.nb[0], sizeof expert);
                chosen.push_back((uint32_t) expert);
            }
        }
        distinct = chosen;
        std::sort(distinct.begin(), distinct.end());
        distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());

        const uint32_t number = *layer_of(node);
        if (recorded) {
            recorded->visit(number, chosen, (size_t) node.ne[0]);
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
    void tell_of_large_batch(uint32_t number, int64_t tokens) {
        const uint32_t experts = owner.layers.at(number);
        const uint64_t needed  = distinct.size() * (owner.largest_layer_bytes / experts) * owner.layers.size();
        if (told || tokens < 2 || needed <= owner.budget_bytes) {
            return;
        }
        told = true;
        owner.log("a batch of " + std::to_string(tokens) + " tokens uses " + std::to_string(distinct.size()) + " of " +
                  std::to_string(experts) + " experts of layer " + std::to_string(number) +
                  ", more than the budget holds of all layers: layers stream through it one by one");
    }

    void release() {
        lease.reset();
        layer = UINT32_MAX;
        ids   = nullptr;
    }
};

context::context(const model & of, llama_context_params parameters) : self(new state { *of.self }) {
    const uint32_t most = of.max_batch();
    if (parameters.n_ubatch == 0) {
        parameters.n_ubatch = parameters.n_batch;
    }
    if (parameters.n_ubatch > most) {
        of.self->log("batches are cut from " + std::to_string(parameters.n_ubatch) + " to " + std::to_string(most) +
                     " tokens: a larger one may use more experts of a layer than the budget of " +
                     mib(of.self->budget_bytes) + " holds");
        parameters.n_ubatch = most;
    }
    parameters.cb_eval             = state::on_node;
    parameters.cb_eval_user_data   = self.get();
    parameters.abort_callback      = state::on_abort;
    parameters.abort_callback_data = self.get();
    // It would copy experts to a device before they are leased.
    parameters.op_offload = false;
    self->handle.reset(llama_init_from_model(of.get(), parameters));
    if (!self->handle) {
        throw std::runtime_error("llama.cpp made no context: see its log");
    }
}

context::~context() = default;

llama_context * context::get() const {
    return self->handle.get();
}

void context::record(const std::string & path) {
    const model::state & owner = self->owner;
    std::vector<trace::layer> layers;
    for (const hoistway_experts_layer_info & layer : owner.store.layers()) {
        layers.push_back({ layer.layer, layer.experts, layer.expert_bytes });
    }
    self->recorded.emplace(path, owner.name, owner.store.describe().experts_per_token, layers);
}

int32_t context::decode(const llama_batch & batch) {
    self->failure = nullptr;
    if (self->recorded) {
        self->recorded->begin(batch, llama_n_ubatch(self->handle.get()));
    }
    const int32_t result = llama_decode(self->handle.get(), batch);
    self->release();
    if (self->failure) {
        std::rethrow_exception(self->failure);
    }
    if (self->recorded) {
        self->recorded->flush();
    }
    return result;
}

} // namespace stream_experts
