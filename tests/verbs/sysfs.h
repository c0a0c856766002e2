// The devices' tree below a root that stands for /, as a kernel shows them.
#pragma once

#include "tests/verbs/fabric.h"

namespace standin {

int write_tree(Fabric& f, const char* root);
void write_tree_if_absent(Fabric& f, const char* root);
void write_state(Fabric& f, const Device& device);
void write_addresses(Fabric& f, const Device& device);

}  // namespace standin
