#include "stream-experts.h"

#include "trace.h"

#include "ggml.h"

#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <optional>
#include <stdexcept>
#include <vector>

#include <sys/sysinfo.h>

namespace stream_experts {
namespace {

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

options with_log(options chosen) {
    if (!chosen.log) {
        chosen.log = [](const std::string & line) { std::fprintf(stderr, "hoistway: %s\n", line.c_str()); };
    }
    return chosen;
}

} // namespace

struct model::state {
    hoistway::Catalog           catalog;
    hoistway_streaming::experts experts;
    std::string                 name;
    std::optional<user_model>   loaded {};

    state(const std::string & path, const options & options)
        : catalog(open_gguf(path)), experts(catalog, with_log(options)),
          name(std::filesystem::path(path).filename().string()) {
        check_address_space(experts.get_store().describe().expert_bytes);
    }

    // Has a stacked tensor lie in the store's address space.
    bool place(ggml_tensor & tensor, const hoistway_tensor & stored) {
        if (!experts.layer_of(stored.name)) {
            return false;
        }
        experts.place(tensor, stored.name);
        return true;
    }
};

model::model(const std::string & path, const options & options, const llama_model_params & parameters)
    : self(std::make_unique<state>(path, options)) {
    // A device's host buffer is pinned: all experts would be resident.
    llama_model_params plain = parameters;
    plain.no_host            = true;
    self->loaded.emplace(self->catalog, path, plain, [this](ggml_tensor & tensor, const hoistway_tensor & stored) {
        return self->place(tensor, stored);
    });
    self->experts.check_placed();
}

model::~model() = default;

llama_model * model::get() const {
    return self->loaded->get();
}

std::string model::stats() const {
    return self->experts.get_store().stats();
}

uint32_t model::max_batch() const {
    return self->experts.max_batch();
}

bool model::holds_all_experts() const {
    return self->experts.holds_all();
}

struct context::state {
    struct deleter {
        void operator()(llama_context * context) const { llama_free(context); }
    };

    const stream_experts::model::state &    owner;
    hoistway_streaming::evaluation          evaluation;
    std::unique_ptr<llama_context, deleter> handle {};
    std::optional<trace>                    recorded {};

    state(const stream_experts::model::state & owner, llama_context_params & parameters)
        : owner(owner), evaluation(owner.experts, parameters) {}
};

context::context(const model & of, llama_context_params parameters) : self(new state(*of.self, parameters)) {
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
    const hoistway::experts::Store & store = self->owner.experts.get_store();
    std::vector<trace::layer> layers;
    for (const hoistway_experts_layer_info & layer : store.layers()) {
        layers.push_back({ layer.layer, layer.experts, layer.expert_bytes });
    }
    self->recorded.emplace(path, self->owner.name, store.describe().experts_per_token, layers);
    self->evaluation.on_choice = [this](uint32_t layer, const std::vector<uint32_t> & chosen, size_t per_token) {
        self->recorded->visit(layer, chosen, per_token);
    };
}

int32_t context::decode(const llama_batch & batch) {
    if (self->recorded) {
        self->recorded->begin(batch, llama_n_ubatch(self->handle.get()));
    }
    const int32_t result = llama_decode(self->handle.get(), batch);
    if (const std::exception_ptr failure = self->evaluation.end()) {
        std::rethrow_exception(failure);
    }
    if (self->recorded) {
        self->recorded->flush();
    }
    return result;
}

} // namespace stream_experts
