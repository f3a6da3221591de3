#include "trace.h"

#include <algorithm>
#include <cstdio>
#include <stdexcept>

namespace stream_experts {
namespace {

std::string quoted(const std::string & text) {
    std::string result = "\"";
    for (const char byte : text) {
        if (byte == '"' || byte == '\\') {
            result += '\\';
            result += byte;
        } else if ((unsigned char) byte < 0x20) {
            char escape[8];
            std::snprintf(escape, sizeof escape, "\\u%04x", (unsigned) byte);
            result += escape;
        } else {
            result += byte;
        }
    }
    return result + '"';
}

} // namespace

trace::trace(const std::string & path, const std::string & model, uint32_t experts_per_token,
             const std::vector<layer> & layers)
    : path(path) {
    if (experts_per_token == 0) {
        throw std::runtime_error("the model does not say how many experts a token uses: nothing can be recorded");
    }
    file.open(path, std::ios::trunc);
    file << "{\"hoistway_trace\":1,\"model\":" << quoted(model) << ",\"experts_per_token\":" << experts_per_token
         << ",\"layers\":[";
    for (size_t i = 0; i < layers.size(); ++i) {
        file << (i > 0 ? "," : "") << "{\"layer\":" << layers[i].number << ",\"experts\":" << layers[i].experts
             << ",\"expert_bytes\":" << layers[i].expert_bytes << '}';
    }
    file << "]}\n";
    flush();
}

void trace::begin(const llama_batch & batch, uint32_t tokens_at_a_time) {
    is_prompt = batch.n_tokens > 1;
    // A prompt may come in several batches.
    turn += is_prompt && was_answer ? 1 : 0;
    was_answer = !is_prompt;
    first      = next;
    next += (uint32_t) batch.n_tokens;
    at_a_time = std::max(tokens_at_a_time, 1u);
    outputs.assign((size_t) batch.n_tokens, false);
    for (size_t i = 0; i < outputs.size(); ++i) {
        outputs[i] = batch.logits ? batch.logits[i] != 0 : i + 1 == outputs.size();
    }
    from  = 0;
    count = 0;
}

void trace::visit(uint32_t layer, const std::vector<uint32_t> & chosen, size_t per_token) {
    if (count == 0 || layer <= last_layer) {
        // The next tokens of the batch pass the first layer.
        from += count;
        count = std::min<size_t>(at_a_time, outputs.size() - std::min(from, outputs.size()));
    }
    last_layer = layer;
    const size_t rows = per_token > 0 ? chosen.size() / per_token : 0;
    const std::vector<uint32_t> tokens = left(rows);
    for (size_t row = 0; row < tokens.size(); ++row) {
        file << "{\"turn\":" << turn << ",\"phase\":\"" << (is_prompt ? "prefill" : "decode")
             << "\",\"step\":" << first + tokens[row] << ",\"layer\":" << layer << ",\"experts\":[";
        for (size_t place = 0; place < per_token; ++place) {
            file << (place > 0 ? "," : "") << chosen[row * per_token + place];
        }
        file << "]}\n";
    }
}

// The tokens that are left in a layer: all of them, or those that have logits. None if there are as many of neither.
std::vector<uint32_t> trace::left(size_t rows) const {
    std::vector<uint32_t> tokens;
    for (size_t i = from; i < from + count; ++i) {
        if (rows == count || outputs[i]) {
            tokens.push_back((uint32_t) i);
        }
    }
    if (tokens.size() != rows) {
        tokens.clear();
    }
    return tokens;
}

void trace::flush() {
    file.flush();
    if (!file) {
        throw std::runtime_error("the trace " + path + " cannot be written");
    }
}

} // namespace stream_experts
