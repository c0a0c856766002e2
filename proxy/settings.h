// A checked copy of te_settings that owns its strings.
#pragma once

#include <string>
#include <vector>

#include "native/status.h"
#include "native/te.h"

namespace te {

// Whether each value is in its range; a setting's name is that of the field.
Error check_rdma(const te_rdma_settings& settings);

struct Settings {
  te_settings values{};  // the strings in it point into the members below
  std::string transport, nics, sim;

  explicit Settings(const te_settings& from) : values(from) {
    transport = from.transport != nullptr ? from.transport : "";
    nics = from.nics != nullptr ? from.nics : "";
    sim = from.sim != nullptr ? from.sim : "";
    values.transport = values.nics = values.sim = nullptr;
  }
  Error check() const;
  std::vector<std::string> nic_names() const;
};

}  // namespace te
