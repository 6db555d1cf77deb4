# GPT-2 and BERT trainers in CUDA C. `make help` lists what there is to make; programs of development are in dev/dev.mk.
#
# make            the programs that this machine can build, and the built-in corpus;  make cpu: the CPU trainers alone
# make DEBUG=1    no optimisation, debug information       SANITIZE=1   AddressSanitizer and UBSan
# make LINEINFO=1 source lines in GPU code, for ncu and compute-sanitizer; compiles an eighth longer
# make MARCH=x86-64-v3   another CPU than this one         MPI=0 NCCL=0 without MPI or NCCL, even if they are installed

# As many jobs as cores, unless -j is given. With `clean` among the targets, one after the other.
ifeq ($(MAKELEVEL)$(filter clean,$(MAKECMDGOALS)),0)
MAKEFLAGS += -j$(shell nproc)
endif

COMMA  := ,
ifeq ($(origin CC),default)
CC := gcc
endif
MARCH  ?= native
# What a compiler for another machine makes does not run here: no corpus is written then, and mpicc is not used.
MACHINE = $(firstword $(subst -, ,$(shell $1 -dumpmachine 2>/dev/null)))
TARGET := $(call MACHINE,$(CC))
CROSS  := $(if $(filter-out gcc,$(CC)),$(if $(call MACHINE,gcc),$(filter-out $(call MACHINE,gcc),$(TARGET))))
B      := build$(if $(DEBUG),/debug)$(if $(SANITIZE),/san)
# Left out: passes of gcc's -O3 that take a quarter of its time and make no step faster (dev/LOG.md).
SLOW   := $(if $(findstring clang,$(CC)),,inline-functions ipa-cp-clone tree-pre gcse tree-dominator-opts tree-vrp)
OPT    := $(if $(DEBUG)$(SANITIZE),-O1 -g,-O3 $(addprefix -fno-,$(SLOW))) -march=$(MARCH)
# Floating point is kept exact: no -ffast-math, which makes NaN checks lie, and no contraction, so that a result does
# not depend on how the compiler cut a loop. -fno-math-errno only lets sqrtf be an instruction. gcc 12 for aarch64 ends
# with an internal error where it makes vectors of fmin() and fmax() of doubles.
CFLAGS := $(OPT) -fopenmp -ffp-contract=off -fno-math-errno $(if $(findstring clang,$(CC)),-Wno-pass-failed) \
          $(if $(filter aarch64,$(TARGET)),-fno-builtin-fmin -fno-builtin-fmax) \
          $(if $(SANITIZE),-fsanitize=address$(COMMA)undefined -fno-sanitize-recover)
WARN   := -Wall -Wextra -Wformat-security -Wno-missing-field-initializers $(WERROR)
# MPI, if its compiler wrapper is found: it starts several ranks.
HAS_MPI := $(if $(filter 0,$(MPI))$(CROSS),,$(shell command -v mpicc 2>/dev/null))
MPI_CPP := $(if $(HAS_MPI),-DUSE_MPI $(patsubst -I%,-isystem %,$(filter -I%,$(shell mpicc -show))))
MPI_LIBS := $(if $(HAS_MPI),$(filter -L% -l%,$(shell mpicc -show)))
CPP    := -D_GNU_SOURCE -I. -Ibuild $(MPI_CPP) -MMD -MP
LIBS   := $(MPI_LIBS) -pthread -lm
# The commit for model cards. No part of $(B)/command: a new commit alone builds nothing again.
COMMIT  = $(if $(wildcard .git),-DBUILD_COMMIT='"$(or $(shell git describe --always --dirty 2>/dev/null),unknown)"')
COMPILE = $(CC) -x c -std=c11 $(CPP) $(CFLAGS) $(WARN)

# The GPU build. ARCH: the GPUs that are here, else those that this nvcc knows of sm_80, sm_90a and sm_100. PTX for
# later GPUs (PTX=80) is added where neither ARCH nor a GPU says which they are: it takes a quarter of a build.
# `make ARCH= PTX=86` makes PTX alone, which a later GPU compiles when a program starts. sm_75 has no bf16.
NVCC   ?= nvcc
HAS_NVCC := $(shell command -v $(NVCC) 2>/dev/null)
GPUS   := $(if $(HAS_NVCC),$(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null))
FOUND  := $(sort $(subst .,,$(GPUS)))
KNOWN  := $(if $(HAS_NVCC),$(subst compute_,,$(shell $(NVCC) --list-gpu-arch)))
ARCH   ?= $(if $(FOUND),$(FOUND:90=90a),$(if $(HAS_NVCC),$(filter $(KNOWN),80) 90a $(filter $(KNOWN),100)))
# As nvidia-smi prints it.
ifneq ($(findstring .,$(ARCH)),)
override ARCH := $(subst .,,$(ARCH:9.0=90a))
endif
PRECISION ?= $(if $(filter 75,$(FOUND)),fp16,bf16)
PTX    ?= $(if $(FOUND)$(filter command environment override,$(firstword $(origin ARCH))),,80)
# CUPTI's header, where the toolkit keeps it apart; without it --profile ends with an error.
TOOLKIT := $(if $(HAS_NVCC),$(dir $(realpath $(HAS_NVCC)))..)
CUPTI  := $(if $(HAS_NVCC),$(wildcard $(TOOLKIT)/extras/CUPTI/include))
# NCCL, likewise: it connects the ranks of the GPU build.
NCCL_AT = $(firstword $(wildcard $(addsuffix /nccl.h,$(NCCL_HOME)/include $(TOOLKIT)/include /usr/include)))
NCCL_H := $(if $(filter 0,$(NCCL)),,$(if $(HAS_NVCC),$(NCCL_AT)))
GENCODE = $(foreach a,$(ARCH),-gencode=arch=compute_$(a),code=sm_$(a)) \
          $(foreach a,$(subst .,,$(PTX)),-gencode=arch=compute_$(a),code=compute_$(a))
NO_BF16 = $(and $(filter bf16,$(PRECISION)),$(filter 75,$(ARCH) $(PTX)))
HOST_WARN := -Wall,-Wextra,-Wno-missing-field-initializers,-Wno-unknown-pragmas,-Wno-string-compare
# Host code is compiled with -O1, device code always with -O3. No -march: at -O1 gcc writes no vzeroupper, which makes
# log() and cos() several times slower on some CPUs. ptxas uses all cores; nvcc's --split-compile makes other code.
NVFLAGS = $(if $(NO_BF16),$(error GPUs of compute capability 7.5 have no bf16: make PRECISION=fp16)) \
          -std=c++17 -O1 $(if $(DEBUG),-g -G) $(GENCODE) $(if $(LINEINFO),-lineinfo) -D_GNU_SOURCE \
          $(if $(DEBUG),,$(if $(filter 90a,$(ARCH)),-DHAS_SM90A)) \
          -DPRECISION_$(shell echo $(PRECISION) | tr a-z A-Z) -I. -Ibuild $(addprefix -I,$(CUPTI)) \
          $(MPI_CPP) $(if $(NCCL_H),-DUSE_NCCL $(addsuffix /include,$(addprefix -I,$(NCCL_HOME)))) \
          -Xcompiler -fopenmp,-ffp-contract=off,-fno-math-errno,$(HOST_WARN) \
          -Xptxas -warn-spills,-split-compile=0 -diag-suppress 177 -MMD -MP
NVLIBS := -lcublasLt $(if $(NCCL_H),$(addsuffix /lib,$(addprefix -L,$(NCCL_HOME))) -lnccl) $(MPI_LIBS) -lgomp
G      := $(B)/$(PRECISION)

HAS_CC := $(shell command -v $(CC) 2>/dev/null)
.DEFAULT_GOAL := $(if $(HAS_CC),all,help)
.PHONY: all cpu apps gpu absent help setup quickstart quickstart-bert test test-full check check-all clean always
.DELETE_ON_ERROR:

# The programs are linked at the top, where people look for them; variants stay in their build folder.
TOP  := $(if $(DEBUG)$(SANITIZE),$(B)/)
GPT2 := $(TOP)train_gpt2
BERT := $(TOP)train_bert
APPS := $(addprefix $(TOP),use_gpt2 use_bert finetune_bert)
GPU_PROGRAMS := train_gpt2cu train_bertcu use_gpt2cu use_bertcu finetune_bertcu
vpath %.cu apps

all: cpu apps gpu absent
cpu: $(GPT2) $(BERT) $(if $(CROSS),,data/builtin/train.bin data/builtin/bert/train.bin)
apps: $(APPS)
gpu: $(if $(HAS_NVCC),$(GPU_PROGRAMS))

# Report the optional parts that are missing. Everything else is built.
absent: cpu apps gpu
	@$(if $(HAS_MPI)$(filter 0,$(MPI))$(CROSS),:,echo "built without MPI: mpicc was not found; make setup adds it")
	@$(if $(if $(HAS_NVCC),$(NCCL_H)$(filter 0,$(NCCL)),there),:,\
	echo "built without NCCL: nccl.h was not found, so the GPU trainers run on one GPU")

# The command line of a build folder. Its programs are built again if the command line has changed.
$(B)/command: COMMAND = $(COMPILE) $(LIBS)
$(G)/command: COMMAND = $(NVCC) $(NVFLAGS) $(NVLIBS)
$(B)/command $(G)/command: always
	@mkdir -p $(@D)
	@echo '$(COMMAND)' | cmp -s - $@ || echo '$(COMMAND)' >$@

# The pages of --profile and --explain, as the numbers of their bytes: C11 cannot include a file as text.
PAGES := build/profile_page.inc build/explain_page.inc
build/profile_page.inc: llmc/profile/head.html llmc/profile/page.html
build/explain_page.inc: llmc/profile/head.html apps/explain/page.html
$(PAGES):
	@mkdir -p $(@D)
	@cat $^ | od -An -v -tu1 | sed 's/\([0-9]\{1,\}\)/\1,/g' >$@

$(GPT2) $(BERT) $(APPS) $(GPU_PROGRAMS): $(PAGES)

$(APPS): WARN += -Wno-unused-function  # they use a part of a trainer's source
$(GPT2) $(BERT) $(APPS): $(TOP)%: %.cu Makefile $(B)/command
	$(COMPILE) $(COMMIT) -MF $(B)/$*.d $< -o $@ $(LIBS)

$(GPU_PROGRAMS): %cu: %.cu Makefile $(G)/command
	$(NVCC) $(NVFLAGS) $(COMMIT) -MF $(G)/$@.d $< -o $@ $(NVLIBS)

-include $(wildcard $(B)/*.d $(G)/*.d)

$(B)/builtin_corpus: dev/data/builtin_corpus.c Makefile $(B)/command
	$(COMPILE) $< -o $@ $(LIBS)

data/builtin/train.bin: $(B)/builtin_corpus
	@mkdir -p $(@D)
	$< $(@D)

# Written by the same program; the rule makes it again where it alone is missing.
data/builtin/bert/train.bin: data/builtin/train.bin | $(B)/builtin_corpus
	@[ -f $@ ] || $(B)/builtin_corpus data/builtin
	@touch $@

include dev/dev.mk

help:
	@echo "make               build the programs that this machine can build, and the built-in corpus"
	@echo "make setup         install what is missing: a C compiler if there is none, and the optional parts"
	@echo "make quickstart    set up, build, train a small GPT-2 on stories;  make quickstart-bert: a BERT"
	@echo "make test          set up, build, test: ten minutes on two cores (ONLY=resume: suites of this name;"
	@echo "                   ONLY=ops OP=gelu: one op);  make test-full: the long suites, half an hour more"
	@echo "make check         a minute: headers, include direction, sizes, formatting, links;  make check-all: the rest"
	@echo "make read          what a plain training step runs: the files in the order to read them, their functions"
	@echo "make ops           ops against their references;  make grad: against finite differences;  make bench: times"
	@echo "make emulated      kernels on the CPU, without a GPU, against the same references (OP=attention for one op)"
	@echo "make exercise      write an op yourself: the exercises (OP=gelu_forward begins one; docs/learning.md)"
	@echo "make ladder        how an op became fast, step by step: tests and times dev/ladder/ (OP=matmul_cpu)"
	@echo "make recsys        DLRM's and NeuMF's trainers, dev/recsys;  make recsys-test: tests of the recommenders"
	@echo "make san           tests under sanitizers;  make mutants: an hour, does a test fail for each planted fault?"
	@echo "make cubins        GPU machine code of every program, architecture and precision, for dev/compare_sass.py"
	@echo "make clean         remove what was built (data and runs stay)"
	@echo "variables:         CC MARCH ARCH PTX PRECISION DEBUG=1 LINEINFO=1 SANITIZE=1 MPI=0 NCCL=0 WERROR=-Werror"

setup:
	@bash dev/setup.sh

quickstart: PROGRAMS = $(if $(FOUND),train_gpt2cu use_gpt2cu,$(GPT2) $(TOP)use_gpt2)
quickstart-bert: PROGRAMS = $(if $(FOUND),train_bertcu use_bertcu,$(BERT) $(TOP)use_bert)
quickstart quickstart-bert:
	@bash dev/setup.sh --needed
	@$(MAKE) --no-print-directory data/builtin/train.bin data/builtin/bert/train.bin $(PROGRAMS)
	@bash scripts/quickstart.sh $(addprefix ./,$(PROGRAMS))

test test-full:
	@bash dev/setup.sh --tests
	@$(SUITES) $(if $(filter test,$@),quick,full)

check check-all:
	@MAKEFLAGS= bash dev/check.sh $(if $(filter check-all,$@),--all)

clean:
	rm -rf build train_gpt2 train_bert use_gpt2 use_bert finetune_bert $(GPU_PROGRAMS)
