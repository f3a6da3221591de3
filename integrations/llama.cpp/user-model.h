// Loads a GGUF model into an unpatched llama.cpp: llama_model_init_from_user makes the tensors, hoistway fills them.
//
// Traps of llama_model_init_from_user, and what is done here:
// * It does not know of split files: the catalog does, and the other files' tensors are added to the first's metadata.
// * It creates every optional tensor, in the file or not. A bias that is not there is zero and a scale one, which
//   changes no result; for any other tensor it is unknown what stands for its absence, so the model is refused.
// * It gives models that use the token embedding as output a second tensor: that is read from the same bytes.
// * It takes weights of type F64, and crashes as it multiplies with them: such models are refused.
#pragma once

#include "hoistway.hpp"

#include "llama.h"

#include <functional>
#include <memory>
#include <string>

struct ggml_tensor;

// Opens a GGUF model, and refuses files of other formats, which llama.cpp does not take. Throws std::runtime_error, or
// hoistway::Error.
hoistway::Catalog open_gguf(const std::string & path);

class user_model {
public:
    // Takes a tensor that the file has, and that lies where `stored` says. False leaves it to be read into its buffer.
    using place_tensor = std::function<bool(ggml_tensor & tensor, const hoistway_tensor & stored)>;

    // Loads the model at `path`, whose catalog `open_gguf` has opened. Throws std::runtime_error, or hoistway::Error if a
    // tensor cannot be read.
    user_model(const hoistway::Catalog & catalog, const std::string & path, const llama_model_params & parameters,
               const place_tensor & place = nullptr);

    llama_model * get() const { return model.get(); }

private:
    struct deleter {
        void operator()(llama_model * model) const { llama_model_free(model); }
    };
    std::unique_ptr<llama_model, deleter> model;
};
