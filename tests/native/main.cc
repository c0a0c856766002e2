// The main function of te_tests. Options: te_tests --help.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>
#include <limits.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <string>

// Transports cx7 and efa and what is for GPUs run over the stand-ins for their libraries, which are built beside this program.
static void use_standins() {
  char self[PATH_MAX] = "";
  static_cast<void>(!readlink("/proc/self/exe", self, sizeof self - 1));
  const std::string folder = std::string(self).substr(0, std::string(self).rfind('/') + 1);
  if (access((folder + "libstandin_verbs.so").c_str(), R_OK) == 0) {
    mkdir((folder + "standin").c_str(), 0777);
    setenv("TE_LIBIBVERBS", (folder + "libstandin_verbs.so").c_str(), 1);
    setenv("TE_RDMA_ROOT", (folder + "standin").c_str(), 1);
    setenv("TE_STANDIN_DEVICES", "16", 1);  // as in engine_support.h
  }
  if (access((folder + "libstandin_fabric.so").c_str(), R_OK) == 0) {  // tcp and shm go through it to the real one
    setenv("TE_LIBFABRIC", (folder + "libstandin_fabric.so").c_str(), 1);
    setenv("TE_STANDIN_FABRIC", "devices=16", 1);
  }
  setenv("TE_LIBCUDA", (folder + "libstandin_cuda.so").c_str(), 1);
  setenv("TE_LIBGDRAPI", (folder + "libstandin_gdrapi.so").c_str(), 1);
  setenv("TE_STANDIN_CUDA", "devices=2", 1);
}

int main(int count, char** arguments) {
  use_standins();
  return doctest::Context(count, arguments).run();
}
