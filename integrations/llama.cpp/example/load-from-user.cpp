// Loads a GGUF model into an unpatched llama.cpp, evaluates fixed tokens, and prints a hash of all logits as a line of JSON.
#include "../user-model.h"
#include "evaluate.h"

#include "ggml-backend.h"

#include <chrono>
#include <cstdio>
#include <exception>

int main(int count, char ** arguments) try {
    if (count != 2) {
        throw std::runtime_error("usage: load-from-user MODEL.gguf");
    }
    log_errors_only();
    ggml_backend_load_all();
    const auto start = std::chrono::steady_clock::now();
    const hoistway::Catalog catalog = open_gguf(arguments[1]);
    const user_model model(catalog, arguments[1], llama_model_default_params());
    const double load_seconds = seconds_since(start);

    const context_ptr context(llama_init_from_model(model.get(), evaluation_parameters(1)));
    const evaluation result = evaluate(context.get(), llama_decode, 8, start);
    std::printf("{\"loaded\": true, \"load_seconds\": %.6f, %s}\n", load_seconds, as_json(result).c_str());
    return 0;
} catch (const std::exception & error) {
    std::fprintf(stderr, "load-from-user: %s\n", error.what());
    return 1;
}
