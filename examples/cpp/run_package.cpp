// Runs .pt2 packages without Python: run_package MODEL.pt2 INPUTS.pt OUTPUTS.pt [MODEL INPUTS OUTPUTS ...]
//
// INPUTS holds a list of tensors, as torch.save writes it; OUTPUTS gets one, for torch.load. With --report MODEL.pt2 it
// prints what attn_pass did to the model, which the package holds as JSON. A package that is named several times in a row
// is loaded once: state it keeps in buffers, such as a cache, goes on from one run to the next.

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

namespace {

std::vector<char> read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  TORCH_CHECK(file, "cannot read ", path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

std::vector<at::Tensor> load(const std::string& path) {
  std::vector<at::Tensor> tensors;
  const at::IValue values = torch::jit::pickle_load(read(path));
  for (const at::IValue& value : values.toListRef()) {
    tensors.push_back(value.toTensor());
  }
  return tensors;
}

void save(const std::vector<at::Tensor>& tensors, const std::string& path) {
  std::vector<char> bytes = torch::jit::pickle_save(at::IValue(tensors));
  std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

}  // namespace

int main(int count, char** words) {
  const std::vector<std::string> arguments(words + 1, words + count);
  if (arguments.size() == 2 && arguments[0] == "--report") {
    torch::inductor::AOTIModelPackageLoader model(arguments[1]);
    std::cout << model.get_metadata()["attn_pass"] << std::endl;
    return 0;
  }
  if (arguments.empty() || arguments.size() % 3 != 0) {
    std::cerr << "run_package MODEL.pt2 INPUTS.pt OUTPUTS.pt [...], or run_package --report MODEL.pt2" << std::endl;
    return 2;
  }
  c10::InferenceMode inference;
  std::unique_ptr<torch::inductor::AOTIModelPackageLoader> model;
  for (size_t at = 0; at < arguments.size(); at += 3) {
    if (at == 0 || arguments[at] != arguments[at - 3]) {
      model = std::make_unique<torch::inductor::AOTIModelPackageLoader>(arguments[at]);
    }
    save(model->run(load(arguments[at + 1])), arguments[at + 2]);
  }
}
