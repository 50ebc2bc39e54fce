// Work for several threads. A function that is said to work "by a team" is called by every thread of a parallel region; it
// shares its loops out with `omp for`, whose barrier is its end. Called outside of a region, it does everything itself.
#pragma once

#include <omp.h>

template <class Work>
void on_team(int threads, const Work& work) {
  if (threads <= 1) return work();
#pragma omp parallel num_threads(threads)
  work();
}
