// Evaluates fixed tokens, so that two ways to load a model can be compared bit by bit.
#pragma once

#include "llama.h"

#include <chrono>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

struct evaluation {
    uint64_t                 hash                = 14695981039346656037u; // FNV-1a of all logits
    double                   first_token_seconds = 0;                     // from `start` to the logits of the prompt
    double                   decode_seconds      = 0;                     // for all tokens after the first
    double                   late_seconds        = 0;                     // for the last half of all tokens
    std::vector<llama_token> tokens {};
};

struct context_deleter {
    void operator()(llama_context * context) const { llama_free(context); }
};
using context_ptr = std::unique_ptr<llama_context, context_deleter>;

inline double seconds_since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// The most memory that this program has had resident. Not `ru_maxrss`, which begins with what the parent had before `exec`.
inline uint64_t peak_bytes() {
    std::ifstream status("/proc/self/status");
    for (std::string line; std::getline(status, line);) {
        if (line.rfind("VmHWM:", 0) == 0) {
            return std::stoull(line.substr(6)) * 1024;
        }
    }
    throw std::runtime_error("/proc/self/status lacks VmHWM");
}

inline void log_errors_only() {
    llama_log_set(
        [](ggml_log_level level, const char * text, void *) {
            if (level == GGML_LOG_LEVEL_ERROR) {
                std::fputs(text, stderr);
            }
        },
        nullptr);
}

inline llama_context_params evaluation_parameters(int threads, int ubatch = 64) {
    llama_context_params parameters = llama_context_default_params();
    parameters.n_ctx           = 256;
    parameters.n_batch         = 64;
    parameters.n_ubatch        = (uint32_t) ubatch;
    parameters.n_threads       = threads;
    parameters.n_threads_batch = threads;
    return parameters;
}

// Decodes a prompt, and then token by token what follows from the logits: not the likeliest token, as the text of random
// weights would soon repeat itself.
template <typename Decode>
evaluation evaluate(llama_context * context, Decode decode, int tokens, std::chrono::steady_clock::time_point start) {
    if (!context) {
        throw std::runtime_error("llama.cpp made no context");
    }
    evaluation result;
    const int vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(context)));
    std::vector<llama_token> batch = { 1, 2, 3, 5, 8, 13, 21, 34 };
    std::chrono::steady_clock::time_point first;
    std::chrono::steady_clock::time_point late;
    for (int i = 0; i < tokens; ++i) {
        if (i == tokens - tokens / 2) {
            late = std::chrono::steady_clock::now();
        }
        if (decode(context, llama_batch_get_one(batch.data(), (int32_t) batch.size())) != 0) {
            throw std::runtime_error("the model cannot be evaluated");
        }
        const float * logits = llama_get_logits_ith(context, -1);
        if (i == 0) {
            first = std::chrono::steady_clock::now();
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
        const llama_token next = (llama_token) (((int64_t) best * 31 + i * 17) % vocabulary);
        result.tokens.push_back(next);
        batch.assign(1, next);
    }
    result.decode_seconds = tokens > 0 ? seconds_since(first) : 0;
    result.late_seconds   = tokens > 1 ? seconds_since(late) : 0;
    return result;
}

// The members of a JSON object.
inline std::string as_json(const evaluation & result) {
    char text[200];
    std::snprintf(text, sizeof text,
                  "\"hash\": \"%016" PRIx64 "\", \"first_token_seconds\": %.6f, \"decode_seconds\": %.6f, "
                  "\"late_seconds\": %.6f, \"tokens\": [",
                  result.hash, result.first_token_seconds, result.decode_seconds, result.late_seconds);
    std::string json = text;
    for (size_t i = 0; i < result.tokens.size(); ++i) {
        json += (i > 0 ? ", " : "") + std::to_string(result.tokens[i]);
    }
    return json + "]";
}
