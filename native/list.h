// An intrusive doubly linked list: membership costs no allocation and an object can leave from the middle.
// The link is a member; an object may be in one list per link. Not thread-safe: lists belong to one thread.
#pragma once

#include <cstddef>

namespace te {

template <typename T>
struct Link {
  T* previous = nullptr;
  T* next = nullptr;
  bool linked = false;
};

template <typename T, Link<T> T::* member>
class List {
 public:
  bool empty() const { return head_ == nullptr; }
  T* front() const { return head_; }
  size_t size() const { return size_; }
  static T* next(T* item) { return (item->*member).next; }
  static bool contains(const T* item) { return (item->*member).linked; }

  void push_back(T* item) {
    Link<T>& link = item->*member;
    link = {tail_, nullptr, true};
    if (tail_ != nullptr) (tail_->*member).next = item;
    else head_ = item;
    tail_ = item;
    ++size_;
  }

  // Nothing happens when the item is in no list.
  void remove(T* item) {
    Link<T>& link = item->*member;
    if (!link.linked) return;
    if (link.previous != nullptr) (link.previous->*member).next = link.next;
    else head_ = link.next;
    if (link.next != nullptr) (link.next->*member).previous = link.previous;
    else tail_ = link.previous;
    link = {};
    --size_;
  }

  T* pop_front() {
    T* item = head_;
    if (item != nullptr) remove(item);
    return item;
  }

 private:
  T* head_ = nullptr;
  T* tail_ = nullptr;
  size_t size_ = 0;
};

}  // namespace te
