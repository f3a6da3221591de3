// Loads a model, evaluates fixed tokens, and prints how long that took and a hash of all logits, as a line of JSON.
#include "../example/evaluate.h"
#include "device.h"

#include "ggml-backend.h"
#include "ggml.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <vector>

#include <sys/mman.h>
#include <sys/resource.h>

namespace {

struct options {
    const char *         model        = nullptr;
    const char *         adapter      = nullptr;
    std::string          mode         = "none";
    bool                 repack       = false;
    bool                 check        = false;
    bool                 device       = false;
    bool                 watch        = false;
    bool                 at_once      = false;
    bool                 cpu_moe      = false;
    bool                 image        = false;
    bool                 train        = false;
    bool                 again        = false;
    float                cancel_at    = -1;
    unsigned long long   touch        = 0;
    int                  tokens       = 8;
    int                  threads      = 1;
    int                  ubatch       = 64;
};

[[noreturn]] void fail(const char * message) {
    std::fprintf(stderr, "logits: %s\n", message);
    std::exit(1);
}

options parse(int count, char ** arguments) {
    options result;
    for (int i = 1; i < count; ++i) {
        const std::string argument = arguments[i];
        const auto value = [&] {
            if (i + 1 == count) {
                fail("a value is missing");
            }
            return arguments[++i];
        };
        if (argument == "--mode") {
            result.mode = value();
        } else if (argument == "--repack") {
            result.repack = true;
        } else if (argument == "--check") {
            result.check = true;
        } else if (argument == "--device") {
            result.device = true;
        } else if (argument == "--watch") {
            result.watch = true;
        } else if (argument == "--at-once") {
            result.at_once = true;
        } else if (argument == "--cpu-moe") {
            result.cpu_moe = true;
        } else if (argument == "--adapter") {
            result.adapter = value();
        } else if (argument == "--image") {
            result.image = true;
        } else if (argument == "--train") {
            result.train = true;
        } else if (argument == "--again") {
            result.again = true;
        } else if (argument == "--cancel-at") {
            result.cancel_at = std::strtof(value(), nullptr);
        } else if (argument == "--touch") {
            result.touch = std::strtoull(value(), nullptr, 10);
        } else if (argument == "--tokens") {
            result.tokens = std::atoi(value());
        } else if (argument == "--threads") {
            result.threads = std::atoi(value());
        } else if (argument == "--ubatch") {
            result.ubatch = std::atoi(value());
        } else {
            result.model = arguments[i];
        }
    }
    if (!result.model) {
        fail("usage: logits [--mode none|mmap|dio] [--repack] [--check] [--device] [--watch] "
             "[--at-once] [--cpu-moe] [--adapter FILE] [--image] [--train] [--again] [--cancel-at PART] [--touch BYTES] "
             "[--tokens COUNT] [--threads COUNT] [--ubatch TOKENS] MODEL");
    }
    return result;
}

// Touches memory and gives it back, so that a virtual machine's host has it before the clock starts. As huge pages: what is
// free afterwards serves small pages and huge ones alike.
void touch(size_t bytes) {
    void * memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory != MAP_FAILED) {
        madvise(memory, bytes, MADV_HUGEPAGE);
        madvise(memory, bytes, MADV_POPULATE_WRITE);
        munmap(memory, bytes);
    }
}

struct progress {
    float cancel_at;
    float latest = 0;
    bool  fell   = false;

    static bool update(float part, void * context) {
        auto & self = *static_cast<progress *>(context);
        self.fell |= part < self.latest;
        self.latest = part;
        return self.cancel_at < 0 || part < self.cancel_at;
    }
};

// What a callback of the caller's sees: the routers' choices, and the layers' results.
struct watching {
    int      nodes = 0;
    uint64_t hash  = 14695981039346656037u;

    static bool on_node(ggml_tensor * node, bool ask, void * context) {
        const std::string name = node->name;
        if (ask) {
            return name.rfind("ffn_moe_topk-", 0) == 0 || name.rfind("l_out-", 0) == 0;
        }
        auto & self = *static_cast<watching *>(context);
        self.nodes += 1;
        std::vector<unsigned char> bytes(ggml_nbytes(node));
        ggml_backend_tensor_get(node, bytes.data(), 0, bytes.size());
        for (const unsigned char byte : bytes) {
            self.hash = (self.hash ^ byte) * 1099511628211u;
        }
        return true;
    }
};

// Evaluates in two more contexts of a model, token by token in turn.
void expect_again(llama_model & model, const llama_context_params & parameters, int tokens, uint64_t hash) {
    const context_ptr other(llama_init_from_model(&model, parameters));
    const context_ptr context(llama_init_from_model(&model, parameters));
    const auto in_turn = [&](llama_context * first, llama_batch batch) {
        const int code = llama_decode(other.get(), batch);
        return code == 0 ? llama_decode(first, batch) : code;
    };
    if (evaluate(context.get(), in_turn, tokens, std::chrono::steady_clock::now()).hash != hash) {
        fail("another context computes something else");
    }
}

double cpu_seconds() {
    rusage usage {};
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_utime.tv_sec + usage.ru_stime.tv_sec + (usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e6;
}

} // namespace

int main(int count, char ** arguments) try {
    const options wanted = parse(count, arguments);
    llama_log_set([](ggml_log_level, const char * text, void *) { std::fputs(text, stderr); }, nullptr);
    ggml_backend_load_all();
    if (wanted.device) {
        register_device();
    }

    llama_model_params model_parameters = llama_model_default_params();
    progress loading { wanted.cancel_at };
    model_parameters.load_mode                   = llama_load_mode_from_str(wanted.mode.c_str());
    model_parameters.use_extra_bufts             = wanted.repack;
    model_parameters.check_tensors               = wanted.check;
    model_parameters.progress_callback           = progress::update;
    model_parameters.progress_callback_user_data = &loading;
    const llama_model_tensor_buft_override experts_on_processor[] = {
        { "\\.ffn_(up|down|gate)_exps", ggml_backend_cpu_buffer_type() },
        { nullptr, nullptr },
    };
    if (wanted.cpu_moe) {
        model_parameters.tensor_buft_overrides = experts_on_processor;
    }
    if (wanted.touch > 0) {
        touch(wanted.touch);
    }

    const double cpu_before = cpu_seconds();
    const auto start = std::chrono::steady_clock::now();
    llama_model * model = llama_model_load_from_file(wanted.model, model_parameters);
    const double load_seconds = seconds_since(start);
    const double load_cpu_seconds = cpu_seconds() - cpu_before;
    if (!model) {
        std::printf("{\"loaded\": false, \"progress\": %.3f}\n", loading.latest);
        return 0;
    }

    watching watched;
    llama_context_params context_parameters = evaluation_parameters(wanted.threads, wanted.ubatch);
    if (wanted.watch) {
        context_parameters.cb_eval           = watching::on_node;
        context_parameters.cb_eval_user_data = &watched;
    }
    if (wanted.at_once) {
        context_parameters.attention_type = LLAMA_ATTENTION_TYPE_NON_CAUSAL;
    }
    context_ptr context(llama_init_from_model(model, context_parameters));
    if (!context) {
        fail("llama.cpp made no context");
    }
    if (wanted.adapter) {
        llama_adapter_lora * adapter = llama_adapter_lora_init(model, wanted.adapter);
        float scale = 1;
        if (!adapter || llama_set_adapters_lora(context.get(), &adapter, 1, &scale) != 0) {
            fail("the adapter cannot be used");
        }
    }
    if (wanted.image) {
        // As llama.cpp's programs do for the tokens of an image.
        llama_set_causal_attn(context.get(), false);
    }
    if (wanted.train) {
        llama_opt_params training {};
        training.param_filter = llama_opt_param_filter_all;
        llama_opt_init(context.get(), model, training);
    }
    const evaluation result = evaluate(context.get(), llama_decode, wanted.tokens, start);
    if (wanted.again) {
        expect_again(*model, context_parameters, wanted.tokens, result.hash);
        context.reset();
        llama_model_free(model);
        model = llama_model_load_from_file(wanted.model, model_parameters);
        expect_again(*model, context_parameters, wanted.tokens, result.hash);
    }
    context.reset();

    rusage usage {};
    getrusage(RUSAGE_SELF, &usage);
    std::printf("{\"loaded\": true, \"load_seconds\": %.6f, \"load_cpu_seconds\": %.6f, %s, \"progress\": %.3f, "
                "\"progress_fell\": %s, \"major_faults\": %ld, \"minor_faults\": %ld, \"peak_bytes\": %" PRIu64
                ", \"watched_nodes\": %d, \"watched_hash\": \"%016" PRIx64 "\"}\n",
                load_seconds, load_cpu_seconds, as_json(result).c_str(), loading.latest,
                loading.fell ? "true" : "false", usage.ru_majflt, usage.ru_minflt, peak_bytes(), watched.nodes,
                watched.hash);
    llama_model_free(model);
    return 0;
} catch (const std::exception & error) {
    fail(error.what());
}
