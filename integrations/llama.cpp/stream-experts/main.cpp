// Runs a mixture of experts under a budget, and prints how fast that was, a hash of all logits and what the store has done,
// as a line of JSON.
#include "../example/evaluate.h"
#include "stream-experts.h"

#include "ggml-backend.h"
#include "ggml-cpu.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <stdexcept>
#include <string>

#include <sys/resource.h>

namespace {

struct settings {
    std::string             model;
    stream_experts::options options;
    std::string             trace;
    int                     tokens  = 64;
    int                     threads = 1;
    int                     ubatch  = 64;
};

settings parse(int count, char ** arguments) {
    settings result;
    for (int i = 1; i < count; ++i) {
        const std::string argument = arguments[i];
        const auto value = [&]() -> std::string {
            if (i + 1 == count) {
                throw std::runtime_error("a value is missing behind " + argument);
            }
            return arguments[++i];
        };
        const auto number = [&] { return std::strtod(value().c_str(), nullptr); };
        if (argument == "--budget-mib") {
            result.options.budget_bytes = (uint64_t) (number() * (1 << 20));
        } else if (argument == "--policy") {
            result.options.policy = value();
        } else if (argument == "--trace") {
            result.trace = value();
        } else if (argument == "--tokens") {
            result.tokens = (int) number();
        } else if (argument == "--threads") {
            result.threads = (int) number();
        } else if (argument == "--ubatch") {
            result.ubatch = (int) number();
        } else {
            result.model = argument;
        }
    }
    if (result.model.empty() || result.options.budget_bytes == 0) {
        throw std::runtime_error("usage: stream-experts --budget-mib MIB [--policy NAME] [--trace FILE] "
                                 "[--tokens COUNT] [--threads COUNT] [--ubatch TOKENS] MODEL.gguf");
    }
    return result;
}

// Threads that sleep while there is nothing to compute if experts are read all the time: those that spin take the processor
// from the reads. If the budget holds all experts, they spin as llama.cpp's do: to wake them in each layer takes longer.
struct compute_threads {
    compute_threads(llama_context * of, int threads, bool spin) : context(of) {
        ggml_threadpool_params parameters = ggml_threadpool_params_default(threads);
        if (!spin) {
            parameters.poll = 0;
        }
        pool = ggml_threadpool_new(&parameters);
        if (pool) {
            llama_attach_threadpool(context, pool, pool);
        }
    }
    ~compute_threads() {
        llama_detach_threadpool(context);
        ggml_threadpool_free(pool);
    }
    compute_threads(const compute_threads &) = delete;
    compute_threads & operator=(const compute_threads &) = delete;

    llama_context *   context;
    ggml_threadpool * pool = nullptr;
};

} // namespace

int main(int count, char ** arguments) try {
    const settings wanted = parse(count, arguments);
    log_errors_only();
    ggml_backend_load_all();
    const auto start = std::chrono::steady_clock::now();
    const stream_experts::model model(wanted.model, wanted.options);
    stream_experts::context context(model, evaluation_parameters(wanted.threads, wanted.ubatch));
    const double load_seconds = seconds_since(start);
    if (!wanted.trace.empty()) {
        context.record(wanted.trace);
    }

    const compute_threads threads(context.get(), wanted.threads, model.holds_all_experts());
    const auto decode = [&](llama_context *, const llama_batch & batch) { return context.decode(batch); };
    const evaluation result = evaluate(context.get(), decode, wanted.tokens, start);
    rusage usage {};
    getrusage(RUSAGE_SELF, &usage);
    const double cpu_seconds = (double) (usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
                               (double) (usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e6;
    std::printf("{\"load_seconds\": %.6f, %s, \"cpu_seconds\": %.6f, \"major_faults\": %ld, \"peak_bytes\": %" PRIu64
                ", \"version\": \"%s\", \"stats\": %s}\n",
                load_seconds, as_json(result).c_str(), cpu_seconds, usage.ru_majflt, peak_bytes(), hoistway_version(),
                model.stats().c_str());
    return 0;
} catch (const std::exception & error) {
    std::fprintf(stderr, "stream-experts: %s\n", error.what());
    return 1;
}
