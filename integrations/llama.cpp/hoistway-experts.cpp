// Ollama compiles this folder into mtmd too, which has no experts.
#ifndef OLLAMA_COMPAT_MTMD_BUILD

#include "hoistway-experts.h"

#include "hoistway-library.h"
#include "hoistway-streaming.h"

#include "../ggml/src/ggml-backend-impl.h"
#include "ggml.h"
#include "llama-impl.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <stdexcept>
#include <utility>

namespace {

// llama.cpp's server shows warnings of its libraries alone, unless it is asked for more.
#define HOISTWAY_SAY LLAMA_LOG_WARN

using hoistway_clock = std::chrono::steady_clock;

constexpr const char * BUDGET = "HOISTWAY_EXPERTS_BUDGET";
constexpr const char * POLICY = "HOISTWAY_EXPERTS_POLICY";
// A server that is killed has no end to report at.
constexpr std::chrono::seconds STATS_INTERVAL { 60 };
constexpr uint64_t MOST_BYTES = INT64_MAX;
// Addresses that ggml counts with before tensors get theirs: nothing is there.
void * const NOWHERE = reinterpret_cast<void *>(uintptr_t { 0x1000 });

// A model whose experts are streamed: its buffer, and its contexts, keep it.
struct streamed_model {
    hoistway_streaming::experts experts;

    ~streamed_model() {
        if (experts.placed_count() > 0) {
            log_stats();
        }
    }

    void log_stats() const {
        try {
            HOISTWAY_SAY("hoistway: experts: %s\n", experts.get_store().stats().c_str());
        } catch (const std::exception & error) {
            LLAMA_LOG_WARN("hoistway: experts: no statistics: %s\n", error.what());
        }
    }
};

// The load of this thread, for what ggml calls.
thread_local std::shared_ptr<streamed_model> * current_load = nullptr;

const char * value_of(const char * name) {
    const char * value = std::getenv(name);
    return value && *value ? value : nullptr;
}

// The bytes that a text such as "4GiB" says.
uint64_t bytes_of(const std::string & text) {
    static const std::pair<const char *, uint64_t> UNITS[] = {
        { "", 1 },
        { "B", 1 },
        { "KB", 1000 },
        { "MB", 1000000 },
        { "GB", 1000000000 },
        { "TB", 1000000000000 },
        { "KiB", uint64_t { 1 } << 10 },
        { "MiB", uint64_t { 1 } << 20 },
        { "GiB", uint64_t { 1 } << 30 },
        { "TiB", uint64_t { 1 } << 40 },
    };
    const auto digits_from = [&](size_t begin) {
        size_t end = begin;
        while (end < text.size() && text[end] >= '0' && text[end] <= '9') {
            ++end;
        }
        return text.substr(begin, end - begin);
    };
    const std::string whole = digits_from(0);
    std::string fraction;
    size_t unit_begin = whole.size();
    if (unit_begin < text.size() && text[unit_begin] == '.') {
        fraction = digits_from(unit_begin + 1);
        unit_begin += 1 + fraction.size();
    }
    for (const auto & [name, factor] : UNITS) {
        if (text.substr(unit_begin) != name || whole.empty() || (fraction.empty() && text.find('.') != std::string::npos)) {
            continue;
        }
        uint64_t bytes = 0;
        for (const char digit : whole) {
            bytes = bytes > MOST_BYTES / 10 ? MOST_BYTES : bytes * 10 + (uint64_t) (digit - '0');
        }
        // From the last digit on, so that nothing is rounded before the end.
        uint64_t rest = 0;
        for (size_t i = fraction.size(); i-- > 0;) {
            rest = ((uint64_t) (fraction[i] - '0') * factor + rest) / 10;
        }
        if (bytes <= (MOST_BYTES - rest) / factor && bytes * factor + rest >= 1) {
            return bytes * factor + rest;
        }
    }
    throw std::runtime_error(std::string(BUDGET) + "=" + text + " is no size: give one such as 4GiB");
}

void refuse_other_formats(const std::string & path) {
    char magic[4] = {};
    // Paths are UTF-8, also on Windows.
    std::ifstream file(std::filesystem::u8path(path), std::ios::binary);
    if (!file) {
        throw std::runtime_error("cannot open " + path);
    }
    file.read(magic, sizeof magic);
    if (std::memcmp(magic, "GGUF", sizeof magic) != 0) {
        throw std::runtime_error(path + " is no GGUF file");
    }
}

uint32_t experts_per_token(const llama_model_params & parameters) {
    static const std::string END = ".expert_used_count";
    for (const auto * given = parameters.kv_overrides; given && given->key[0] != 0; ++given) {
        const std::string key = given->key;
        if (given->tag == LLAMA_KV_OVERRIDE_TYPE_INT && key.size() > END.size() &&
            key.compare(key.size() - END.size(), END.size(), END) == 0 && given->val_i64 > 0) {
            return (uint32_t) std::min<int64_t>(given->val_i64, UINT32_MAX);
        }
    }
    return 0;
}

bool is_on_device(ggml_backend_buffer_type_t type) {
    if (ggml_backend_buft_is_host(type)) {
        return false;
    }
    // The processor has types of its own for weights that it repacks.
    const ggml_backend_dev_t device = ggml_backend_buft_get_device(type);
    return device && ggml_backend_dev_type(device) != GGML_BACKEND_DEVICE_TYPE_CPU;
}

// A buffer without memory: its tensors lie in the address space of a store.
struct experts_buffer {
    std::shared_ptr<streamed_model> model;

    static experts_buffer & of(ggml_backend_buffer_t buffer) { return *static_cast<experts_buffer *>(buffer->context); }

    static void free(ggml_backend_buffer_t buffer) { delete &of(buffer); }

    static void * base(ggml_backend_buffer_t) { return NOWHERE; }

    static ggml_status place(ggml_backend_buffer_t buffer, ggml_tensor * tensor) {
        try {
            of(buffer).model->experts.place(*tensor, tensor->name);
            return GGML_STATUS_SUCCESS;
        } catch (const std::exception & error) {
            LLAMA_LOG_ERROR("hoistway: '%s' cannot be streamed: %s\n", tensor->name, error.what());
            return GGML_STATUS_FAILED;
        }
    }

    [[noreturn]] static void refuse(const ggml_tensor * tensor, const char * what) {
        throw std::runtime_error(std::string("'") + tensor->name + "' is " + what +
                                 ", but its experts stay on the drive: load this model without " + BUDGET);
    }

    static void fill(ggml_backend_buffer_t, ggml_tensor * tensor, uint8_t, size_t, size_t) {
        refuse(tensor, "to be written");
    }
    static void set(ggml_backend_buffer_t, ggml_tensor * tensor, const void *, size_t, size_t) {
        refuse(tensor, "to be converted");
    }
    static void get(ggml_backend_buffer_t, const ggml_tensor * tensor, void *, size_t, size_t) {
        refuse(tensor, "to be read");
    }
    static void clear(ggml_backend_buffer_t, uint8_t) {}
};

const char * buffer_name(ggml_backend_buffer_type_t) {
    return "hoistway_experts";
}

ggml_backend_buffer_t make_buffer(ggml_backend_buffer_type_t type, size_t bytes) {
    if (!current_load || !*current_load) {
        LLAMA_LOG_ERROR("hoistway: adapters of experts cannot be loaded with %s\n", BUDGET);
        return nullptr;
    }
    ggml_backend_buffer_i calls {};
    calls.free_buffer   = experts_buffer::free;
    calls.get_base      = experts_buffer::base;
    calls.init_tensor   = experts_buffer::place;
    calls.memset_tensor = experts_buffer::fill;
    calls.set_tensor    = experts_buffer::set;
    calls.get_tensor    = experts_buffer::get;
    calls.clear         = experts_buffer::clear;
    return ggml_backend_buffer_init(type, calls, new experts_buffer { *current_load }, bytes);
}

size_t buffer_alignment(ggml_backend_buffer_type_t) {
    return 64;
}

bool buffer_is_host(ggml_backend_buffer_type_t) {
    return true;
}

ggml_backend_buffer_type_t experts_buffer_type() {
    static ggml_backend_buffer_type type = [] {
        ggml_backend_buffer_type made {};
        made.iface.get_name      = buffer_name;
        made.iface.alloc_buffer  = make_buffer;
        made.iface.get_alignment = buffer_alignment;
        made.iface.is_host       = buffer_is_host;
        made.device              = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
        return made;
    }();
    return &type;
}

// The model that a tensor's buffer belongs to; none if it is not streamed, or if nothing was allocated.
std::shared_ptr<streamed_model> model_of(const ggml_tensor * tensor) {
    if (!hoistway_experts_load::holds(tensor) || !tensor->buffer->context) {
        return nullptr;
    }
    return experts_buffer::of(tensor->buffer).model;
}

} // namespace

struct hoistway_experts_load::state {
    std::shared_ptr<streamed_model>   model;
    std::shared_ptr<streamed_model> * before = std::exchange(current_load, nullptr);

    ~state() { current_load = before; }
};

hoistway_experts_load::hoistway_experts_load(const std::string & path, const std::vector<std::string> & splits, bool is_file,
                                             llama_model_params & parameters)
    : self(new state) {
    const char * budget = value_of(BUDGET);
    if (!budget || parameters.vocab_only || (path.empty() && !is_file)) {
        // Without a path or a file, the program gives the weights itself.
        return;
    }
    hoistway_streaming::options options;
    options.budget_bytes      = bytes_of(budget);
    options.policy            = value_of(POLICY) ? value_of(POLICY) : "";
    options.experts_per_token = experts_per_token(parameters);
    if (!parameters.no_alloc) {
        options.log = [](const std::string & line) { HOISTWAY_SAY("hoistway: %s\n", line.c_str()); };
    }
    hoistway_load_experts_functions();
    if (path.empty()) {
        throw std::runtime_error(std::string(BUDGET) + " is set, and the model is an open file: give its path");
    }
    refuse_other_formats(path);
    const hoistway::Catalog catalog(splits.empty() ? std::vector<std::string> { path } : splits);
    std::shared_ptr<streamed_model> model;
    try {
        model.reset(new streamed_model { { catalog, options } });
    } catch (const hoistway_streaming::no_experts &) {
        HOISTWAY_SAY("hoistway: the model has no experts, which %s could limit: all weights are loaded\n", BUDGET);
        return;
    }
    hoistway_streaming::refuse_doubles(catalog);
    if (parameters.load_mode == LLAMA_LOAD_MODE_MLOCK || parameters.load_mode == LLAMA_LOAD_MODE_MMAP_MLOCK) {
        throw std::runtime_error(std::string(BUDGET) + " is set, and weights are to be locked in memory: choose one");
    }
    if (parameters.check_tensors) {
        throw std::runtime_error(std::string(BUDGET) + " is set, and all weights are to be checked: choose one");
    }
    if (parameters.load_mode == LLAMA_LOAD_MODE_AUTO || parameters.load_mode == LLAMA_LOAD_MODE_MMAP) {
        // A mapping would read all of the file ahead.
        parameters.load_mode = LLAMA_LOAD_MODE_NONE;
        if (!parameters.no_alloc) {
            HOISTWAY_SAY("hoistway: weights beside the experts are read into memory, not mapped\n");
        }
    }
    if (!parameters.no_alloc) {
        const hoistway_experts_model described = model->experts.get_store().describe();
        HOISTWAY_SAY("hoistway: %llu experts, %.1f MiB, stay on the drive; %.1f MiB of them in memory at a time\n",
                     (unsigned long long) described.experts, described.expert_bytes / 1048576.0,
                     options.budget_bytes / 1048576.0);
    }
    self->model  = std::move(model);
    current_load = &self->model;
}

hoistway_experts_load::~hoistway_experts_load() = default;

ggml_backend_buffer_type_t hoistway_experts_load::buffer_type(const ggml_tensor * tensor, ggml_backend_buffer_type_t chosen) {
    if (!current_load || !(*current_load)->experts.layer_of(tensor->name)) {
        return chosen;
    }
    if (is_on_device(chosen)) {
        throw std::runtime_error(std::string(BUDGET) + " is set, and '" + tensor->name + "' is to lie on " +
                                 ggml_backend_buft_name(chosen) +
                                 ": experts are streamed to memory of the host alone, choose --cpu-moe or --n-gpu-layers 0");
    }
    return experts_buffer_type();
}

bool hoistway_experts_load::holds(const ggml_tensor * tensor) {
    return tensor->buffer && tensor->buffer->buft == experts_buffer_type();
}

void hoistway_experts_load::check_before_reading() {
    if (current_load) {
        (*current_load)->experts.check_placed();
    }
}

struct HOISTWAY_HIDDEN hoistway_experts_context::state {
    std::shared_ptr<streamed_model> model;
    hoistway_streaming::evaluation  evaluation;
    hoistway_clock::time_point      logged = hoistway_clock::now();
};

hoistway_experts_context::hoistway_experts_context(std::unique_ptr<state> made) : self(std::move(made)) {}

hoistway_experts_context::~hoistway_experts_context() = default;

std::unique_ptr<hoistway_experts_context>
hoistway_experts_context::of(const std::vector<std::pair<std::string, ggml_tensor *>> & tensors, bool is_causal,
                             bool rolls_back, llama_context_params & parameters) {
    for (const auto & [name, tensor] : tensors) {
        if (auto model = model_of(tensor)) {
            const hoistway_streaming::experts & experts = model->experts;
            const bool is_cut = experts.max_batch() != UINT32_MAX;
            if (is_cut && (!is_causal || parameters.attention_type == LLAMA_ATTENTION_TYPE_NON_CAUSAL)) {
                throw std::runtime_error(std::string(BUDGET) + " is less than a layer's experts, and this model computes all of a "
                                                               "prompt at once: enlarge it");
            }
            std::unique_ptr<state> made(new state { std::move(model), { experts, parameters } });
            // llama.cpp ends the process if a batch does not hold one token more than the states that it keeps.
            if (is_cut && rolls_back && parameters.n_rs_seq > 0 && parameters.n_ubatch <= parameters.n_rs_seq + 1) {
                throw std::runtime_error(std::string(BUDGET) + " allows batches of " + std::to_string(parameters.n_ubatch) +
                                         " tokens, and drafts of this model need " +
                                         std::to_string(uint64_t { parameters.n_rs_seq } + 2) + ": enlarge it");
            }
            return std::unique_ptr<hoistway_experts_context>(new hoistway_experts_context(std::move(made)));
        }
    }
    return nullptr;
}

void hoistway_experts_context::chain_abort(ggml_abort_callback & callback, void *& data) {
    self->evaluation.chain_abort(callback, data);
}

bool hoistway_experts_context::takes(uint32_t tokens, bool is_causal, uint32_t ubatch) const {
    // llama.cpp would end the process.
    if (is_causal || tokens <= ubatch) {
        return true;
    }
    LLAMA_LOG_ERROR("hoistway: the batch has no result: its %u tokens are computed at once, as those of images are, and batches "
                    "have up to %u; they are not cut if %s holds all experts of a layer\n",
                    tokens, ubatch, BUDGET);
    return false;
}

void hoistway_experts_context::refuse_training() {
    throw std::runtime_error(std::string("experts stay on the drive: train without ") + BUDGET);
}

bool hoistway_experts_context::end() {
    const std::exception_ptr failure = self->evaluation.end();
    const auto now = hoistway_clock::now();
    if (now - self->logged >= STATS_INTERVAL) {
        self->logged = now;
        self->model->log_stats();
    }
    if (!failure) {
        return true;
    }
    try {
        std::rethrow_exception(failure);
    } catch (const std::exception & error) {
        LLAMA_LOG_ERROR("hoistway: the batch has no result: %s\n", error.what());
    } catch (...) {
        LLAMA_LOG_ERROR("hoistway: the batch has no result: an exception without a text\n");
    }
    return false;
}

#endif
