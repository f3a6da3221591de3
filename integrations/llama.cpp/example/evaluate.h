// Evaluates fixed tokens, so that two ways to load a model can be compared bit by bit.
#pragma once

#include "llama.h"

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

struct evaluation {
    bool     done                = false;
    uint64_t hash                = 14695981039346656037u; // FNV-1a of all logits
    double   first_token_seconds = 0;
};

inline double seconds_since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

inline evaluation evaluate(llama_model * model, int tokens, int threads, std::chrono::steady_clock::time_point start) {
    llama_context_params parameters = llama_context_default_params();
    parameters.n_ctx           = 256;
    parameters.n_batch         = 64;
    parameters.n_ubatch        = 64;
    parameters.n_threads       = threads;
    parameters.n_threads_batch = threads;
    const std::unique_ptr<llama_context, decltype(&llama_free)> context(llama_init_from_model(model, parameters),
                                                                        llama_free);
    evaluation result;
    const int vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));
    std::vector<llama_token> batch = { 1, 2, 3, 5, 8, 13, 21, 34 };
    for (int i = 0; context && i < tokens; ++i) {
        if (llama_decode(context.get(), llama_batch_get_one(batch.data(), (int32_t) batch.size())) != 0) {
            return result;
        }
        const float * logits = llama_get_logits_ith(context.get(), -1);
        if (i == 0) {
            result.first_token_seconds = seconds_since(start);
        }
        const auto * bytes = reinterpret_cast<const unsigned char *>(logits);
        for (size_t j = 0; j < vocabulary * sizeof(float); ++j) {
            result.hash = (result.hash ^ bytes[j]) * 1099511628211u;
        }
        int best = 0;
        for (int j = 1; j < vocabulary; ++j) {
            best = logits[j] > logits[best] ? j : best;
        }
        batch.assign(1, best);
    }
    result.done = context != nullptr;
    return result;
}
