# SPDX-License-Identifier: Apache-2.0
# Tests, found by folder. Labels say of which kind a test is; a name that ends in _long adds the label long, which
# `make test` leaves out.
find_package(GTest REQUIRED)
include(GoogleTest)

set(tests ${PROJECT_SOURCE_DIR}/tests)
# Limits are for hangs: far above what a busy machine needs. Sanitizers make everything slower.
set(seconds_factor 1)
if(MOE_SANITIZE)
  set(seconds_factor 5)
endif()
math(EXPR seconds_short "120 * ${seconds_factor}")
math(EXPR seconds_long "600 * ${seconds_factor}")

# One ctest entry per test case: each gets a process and a time limit of its own. Not those on GPUs, where a process
# takes long to begin: they have `cuda` in their names.
function(moe_discover target label)
  gtest_discover_tests(${target} TEST_PREFIX ${label}. TEST_LIST ${target}_short
    TEST_FILTER "-*_long:*_long/*:*cuda_*"
    DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60 PROPERTIES LABELS ${label} TIMEOUT ${seconds_short})
  gtest_discover_tests(${target} TEST_PREFIX ${label}. TEST_LIST ${target}_long TEST_FILTER "*_long:*_long/*-*cuda_*"
    DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60 PROPERTIES LABELS long TIMEOUT ${seconds_long})
endfunction()

# A test that is a program or a script of its own.
function(moe_add_test name label)
  add_test(NAME ${label}.${name} COMMAND ${ARGN})
  set_tests_properties(${label}.${name} PROPERTIES LABELS ${label} TIMEOUT ${seconds_short} SKIP_RETURN_CODE 77)
  if(name MATCHES "_long$")
    set_tests_properties(${label}.${name} PROPERTIES LABELS long TIMEOUT ${seconds_long})
  endif()
endfunction()

# Unit tests link the objects: they look inside.
file(GLOB_RECURSE unit_sources CONFIGURE_DEPENDS ${tests}/unit/*.cc)
if(NOT MOE_CUDA_ENABLED)
  list(FILTER unit_sources EXCLUDE REGEX "/tests/unit/transport/cuda_ipc/")
endif()
if(unit_sources)
  add_executable(moe_unit_tests ${unit_sources})
  target_include_directories(moe_unit_tests PRIVATE ${tests})
  target_link_libraries(moe_unit_tests PRIVATE moecl_objects GTest::gtest GTest::gtest_main)
  # NCCL is looked for in what the process has loaded: here, a stand-in that needs no GPU.
  add_library(simnccl SHARED ${tests}/simnccl/simnccl.cc)
  target_include_directories(simnccl PUBLIC ${tests})
  target_link_libraries(simnccl PRIVATE Threads::Threads)
  target_link_libraries(moe_unit_tests PRIVATE simnccl)
  moe_discover(moe_unit_tests unit)
endif()

# The transport between GPUs, once more without any: a stand-in takes the place of the driver.
if(MOE_CUDA_ENABLED AND unit_sources)
  add_library(simcuda SHARED ${tests}/simcuda/simcuda.cc)
  target_include_directories(simcuda SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
  set_target_properties(simcuda PROPERTIES OUTPUT_NAME cuda SOVERSION 1
    LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/simcuda)
  add_dependencies(moe_unit_tests simcuda)
  set(with_simcuda ${CMAKE_COMMAND} -E env LD_LIBRARY_PATH=${PROJECT_BINARY_DIR}/simcuda)
  moe_add_test(simcuda unit ${with_simcuda} $<TARGET_FILE:moe_unit_tests> --gtest_filter=*CudaIpc*)
  moe_add_test(simcuda_shared_gpu unit ${with_simcuda} MOE_ALLOW_SHARED_GPU=1 $<TARGET_FILE:moe_unit_tests>
    --gtest_filter=CudaIpc.ThreadsShareAGpuOnlyWhenAllowed)
endif()

# Conformance tests see what a user sees.
file(GLOB_RECURSE conformance_sources CONFIGURE_DEPENDS ${tests}/conformance/*.cc)
if(NOT MOE_CUDA_ENABLED)
  list(FILTER conformance_sources EXCLUDE REGEX "/tests/conformance/cuda_")
endif()
if(conformance_sources)
  add_executable(moe_conformance ${conformance_sources})
  target_include_directories(moe_conformance PRIVATE ${tests})
  target_link_libraries(moe_conformance PRIVATE moecl GTest::gtest)
  moe_discover(moe_conformance conformance)
  # What was discovered takes the direct path; once more in the low-latency path, in two processes.
  moe_add_test(low_latency conformance moe_conformance --gtest_brief=1 --gtest_filter=*Exact*-*_long*:*cuda_*)
  moe_add_test(low_latency_others conformance moe_conformance --gtest_brief=1
    --gtest_filter=-*Exact*:*_long*:*cuda_*)
  set_tests_properties(conformance.low_latency conformance.low_latency_others PROPERTIES ENVIRONMENT MOE_PATH=2
    TIMEOUT 900)
  # Small communicators tag their words, and nobody gets expert slots without asking.
  set(in_other_slots moe_conformance --gtest_brief=1
    --gtest_filter=*Exact*:*Quantize*:*Refusal*:*Failure*-*_long*:*cuda_*)
  moe_add_test(signals conformance ${in_other_slots})
  moe_add_test(expert_slots conformance ${in_other_slots})
  moe_add_test(expert_slots_signals conformance ${in_other_slots})
  set_tests_properties(conformance.signals conformance.expert_slots conformance.expert_slots_signals PROPERTIES
    TIMEOUT 900)
  set_tests_properties(conformance.signals PROPERTIES ENVIRONMENT "MOE_PATH=2;MOE_FORMAT=2")
  set_tests_properties(conformance.expert_slots PROPERTIES ENVIRONMENT "MOE_PATH=2;MOE_SLOTS=2;MOE_FORMAT=1")
  set_tests_properties(conformance.expert_slots_signals PROPERTIES
    ENVIRONMENT "MOE_PATH=2;MOE_SLOTS=2;MOE_FORMAT=2")
endif()
if(MOE_CUDA_ENABLED AND conformance_sources)
  target_compile_definitions(moe_conformance PRIVATE MOE_TEST_CUDA=1)
  target_link_libraries(moe_conformance PRIVATE CUDA::cudart_static)
  set(test_gpu ${PROJECT_SOURCE_DIR}/scripts/test_gpu.sh)
  moe_add_test(conformance gpu ${test_gpu} --conformance ${PROJECT_BINARY_DIR})
  moe_add_test(conformance_long gpu ${test_gpu} --conformance --long ${PROJECT_BINARY_DIR})
  set_tests_properties(gpu.conformance gpu.conformance_long PROPERTIES TIMEOUT 1800 RUN_SERIAL ON)
endif()

# The header is C99 and the library usable from C: every file is a program. Warnings are errors, MOE_WERROR or not.
file(GLOB c_sources CONFIGURE_DEPENDS ${tests}/c/*.c ${PROJECT_SOURCE_DIR}/examples/*.c)
foreach(source IN LISTS c_sources)
  get_filename_component(name ${source} NAME_WE)
  add_executable(${name} ${source})
  target_compile_options(${name} PRIVATE -pedantic -Werror)
  target_link_libraries(${name} PRIVATE moecl Threads::Threads ${CMAKE_DL_LIBS})
  moe_add_test(${name} c ${name})
endforeach()
# It expects a launcher: here, one that starts one rank.
set_tests_properties(c.hello PROPERTIES ENVIRONMENT "RANK=0;WORLD_SIZE=1;LOCAL_WORLD_SIZE=1")

# Programs for GPUs need no test framework; without a GPU they are skipped by name. Several ranks may share a GPU here.
if(MOE_CUDA_ENABLED)
  add_executable(gpu_hash_check ${tests}/gpu/hash_check.cu)
  target_link_libraries(gpu_hash_check PRIVATE moecl CUDA::cudart_static Threads::Threads)
  foreach(layout views rank expert padded)
    moe_add_test(hash_${layout} gpu gpu_hash_check --layout ${layout} --calls 100 --tokens 600 --stall 300)
    moe_add_test(hash_${layout}_odd gpu gpu_hash_check --layout ${layout} --calls 20 --tokens 300 --hidden 121
      --experts 257 --topk 9)
    moe_add_test(hash_${layout}_long gpu gpu_hash_check --layout ${layout} --calls 5000 --tokens 600 --stall 300)
  endforeach()
endif()

# Libraries with a deliberate fault each in their kernels: mutants/<NAME>/libmoecl.so of `make gpu_mutants`, for
# scripts/gpu_mutants.sh. The host's part is as it was.
if(MOE_CUDA_ENABLED AND cuda_sources)
  file(STRINGS ${tests}/gpu/mutants.txt mutant_lines REGEX "^[A-Z]")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${tests}/gpu/mutants.txt)
  set(mutants "")
  foreach(line IN LISTS mutant_lines)
    string(REGEX MATCH "^[A-Z_]+" mutant "${line}")
    list(APPEND mutants ${mutant})
  endforeach()
  list(REMOVE_DUPLICATES mutants)
  add_custom_target(gpu_mutants)
  foreach(mutant IN LISTS mutants)
    add_library(mutant_${mutant}_kernels OBJECT EXCLUDE_FROM_ALL ${PROJECT_SOURCE_DIR}/src/device/kernels.cu)
    set_target_properties(mutant_${mutant}_kernels PROPERTIES POSITION_INDEPENDENT_CODE ON
      CXX_VISIBILITY_PRESET hidden CUDA_VISIBILITY_PRESET hidden)
    target_include_directories(mutant_${mutant}_kernels PRIVATE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
    target_compile_definitions(mutant_${mutant}_kernels PRIVATE MOE_HAVE_CUDA=1 MOE_MUTANT_${mutant})
    add_library(mutant_${mutant} SHARED EXCLUDE_FROM_ALL $<TARGET_OBJECTS:mutant_${mutant}_kernels>
      $<FILTER:$<TARGET_OBJECTS:moecl_objects>,EXCLUDE,/kernels\\.cu>)
    set_target_properties(mutant_${mutant} PROPERTIES OUTPUT_NAME moecl SOVERSION ${PROJECT_VERSION_MAJOR}
      LINKER_LANGUAGE CXX LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/mutants/${mutant})
    target_link_libraries(mutant_${mutant} PRIVATE ${library_dependencies})
    target_link_options(mutant_${mutant} PRIVATE -Wl,--version-script=${PROJECT_SOURCE_DIR}/src/moecl.map
      -Wl,-z,nodelete)
    add_dependencies(gpu_mutants mutant_${mutant})
  endforeach()
endif()

# Scripts drive the tools and check the tree. They measure time and start processes, so nothing runs beside them. What
# they start does not inherit MOE_BIN and MOE_SOURCE: the library would warn of settings that it does not know.
file(GLOB scripts CONFIGURE_DEPENDS ${tests}/scripts/*.sh)
foreach(script IN LISTS scripts)
  get_filename_component(name ${script} NAME_WE)
  moe_add_test(${name} script bash -c "export -n MOE_BIN MOE_SOURCE && . \"$0\"" ${script})
  set_tests_properties(script.${name} PROPERTIES RUN_SERIAL ON
    ENVIRONMENT "MOE_BIN=${PROJECT_BINARY_DIR}/bin;MOE_SOURCE=${PROJECT_SOURCE_DIR}")
endforeach()
